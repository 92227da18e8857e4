"""One worker process: load the model, connect, tick until told to stop, hand back what is left."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.queue_state import WorkerCard
from llamaq.worker.engine import gguf_vocab
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import ContextOptions, Model
from llamaq.worker.engine.model_files import resolve_model_file
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.plugins import load_hooks, load_strategy
from llamaq.worker.process.cache_factory import (
    choose_held_cells,
    choose_n_sequences,
    make_offload,
    make_prefix_cache,
    make_saved_slot_files,
)
from llamaq.worker.process.exit_codes import EXIT_CANNOT_START, EXIT_CRASHED, EXIT_FORCED, EXIT_OK
from llamaq.worker.process.io_thread import IoThread
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.slot_files.command_handler import SlotCommandHandler
from llamaq.worker.slot_files.slot_operations import SlotOperations

log = logging.getLogger(__name__)

SAVE_S = 10.0
"""How long a stopping worker may write its prefix cache to disk."""
SWITCH_INTERVAL_S = 0.0002
"""llama_decode gives the GIL away; with Python's default of 5 ms it gets it back late beside a busy I/O thread."""

Watch = Callable[[TickLoop], AbstractContextManager[object]]


class WorkerProcess:
    """Everything that one worker consists of, wired together."""

    def __init__(self, settings: WorkerSettings, watch: Watch = nullcontext) -> None:
        """Load the model; raises `ModelError` or `InvalidSettings`. `watch` sees the ticks while they run."""
        path = resolve_model_file(settings.model)
        strategy, hooks = load_strategy(settings.batch_strategy), load_hooks(settings.hooks)
        log.info("model.loading path=%s shipped=%s", path.name, settings.model is None)
        self._settings, self._watch = settings, watch
        self._engine = engine = load_engine(path, settings)
        self._blob = gguf_vocab.extract_vocab(path)
        self._grammar_sandbox = GrammarSandbox(self._blob)
        self._telemetry = Telemetry(hooks)
        self.card = self._describe(path.name)
        offload = make_offload(settings, engine, path)
        scheduler = Scheduler(
            SlotPool(
                settings.n_parallel,
                engine.context.n_ctx,
                engine.sequences.n_sequences,
                similarity=settings.slot_prompt_similarity,
                shares_cells=engine.context.kv_unified,
            ),
            engine.sequences,
            budget=engine.context.n_batch,
            chunk_size=settings.chunk_size,
            end_tokens=engine.vocab.end_tokens,
            strategy=strategy,
            cache=make_prefix_cache(settings, engine),
            tiers=offload,
            held_cells=choose_held_cells(settings, engine),
            worker=self.card.worker,
        )
        self._scheduler = scheduler
        self._ticks = TickLoop(
            scheduler,
            engine,
            self._telemetry,
            hang_s=settings.hang_s,
            capacity=settings.n_parallel + settings.inbox_window,
        )
        preparer = JobPreparer(
            engine.vocab,
            self._grammar_sandbox,
            settings.sampling,
            context_limit=min(engine.context.cells_per_sequence, engine.model.n_ctx_train),
            max_request_bytes=settings.max_request_bytes,
            counts_system_tokens=not engine.sequences.can_cut,
        )
        states = SlotOperations(scheduler.memory, engine.sequences, offload)
        self._control = SlotCommandHandler(self._ticks, states, make_saved_slot_files(settings, engine, path))
        self._link = IoThread(settings, self.card, self._blob, preparer, self._ticks, self._telemetry, self._control)
        self._signals = 0

    def _describe(self, model: str) -> WorkerCard:
        engine, host = self._engine, socket.gethostname()
        return WorkerCard(
            worker=f"{host}-{os.getpid()}-{secrets.token_hex(3)}",
            queue=self._settings.queue,
            model=model,
            n_ctx=engine.context.n_ctx,
            n_ctx_train=engine.model.n_ctx_train,
            n_vocab=engine.vocab.n_tokens,
            n_parallel=self._settings.n_parallel,
            quantization=engine.model.quantization,
            chat_template=engine.vocab.chat_template,
            vocab_hash=hashlib.sha256(self._blob).hexdigest(),
            host=host,
            pid=os.getpid(),
            device="all" if self._settings.device is None else str(self._settings.device),
            version=version("llamaq"),
            started_ms=int(time.time() * 1000),
        )

    def run(self) -> int:
        """Serve the queue until SIGTERM or SIGINT; returns the process's exit code."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.freeze()  # what is here by now stays: a collection need not walk it again, in the middle of a tick
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            if (error := self._link.start()) is not None:
                return EXIT_CANNOT_START if isinstance(error, LlamaqError) else EXIT_CRASHED
            log.info("worker.ready id=%s queue=%s slots=%d", self.card.worker, self.card.queue, self.card.n_parallel)
            with self._watch(self._ticks):
                self._ticks.run()
        except Exception:
            self._link.has_crashed = True
            raise
        finally:
            self._shut_down()
        if self._link.error is not None:
            return EXIT_CRASHED
        return EXIT_FORCED if self._signals > 1 else EXIT_OK

    def stop(self, grace_s: float) -> None:
        """Claim nothing more; running jobs may go on for `grace_s`, what is left then is handed back."""
        self._link.stop_intake()
        self._ticks.stop(grace_s)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """The first signal asks, the second ends at once."""
        self._signals += 1
        log.info("worker.stopping signal=%s", signal.Signals(number).name)
        self.stop(self._settings.drain_s if self._signals == 1 else 0)

    def _shut_down(self) -> None:
        for job in self._scheduler.close():
            log.info("job.unfinished id=%s", job.id)
        self._link.close()
        self._control.close()
        self._scheduler.save(SAVE_S)  # after the jobs were handed back: others go on with them meanwhile
        self._grammar_sandbox.close()
        self._engine.close()
        log.info("worker.stopped id=%s jobs=%d", self.card.worker, self._telemetry.jobs_done)


def load_engine(path: Path, settings: WorkerSettings) -> Engine:
    """The engine that these settings describe; raises `ModelError` or `EngineError`."""
    model = Model(path, n_gpu_layers=settings.n_gpu_layers, main_gpu=settings.device)
    n_sequences = choose_n_sequences(settings, model)
    options = ContextOptions(
        n_ctx=settings.n_ctx,
        n_batch=settings.batch_budget,
        n_ubatch=settings.n_ubatch,
        n_seq_max=n_sequences,
        has_scratch_sequence=n_sequences > settings.n_parallel,
        n_threads=settings.n_threads,
        n_threads_batch=settings.n_threads,
        kv_unified=settings.kv_unified,
        flash_attn=settings.flash_attn,
    )
    return Engine(model, options)


def serve(settings: WorkerSettings, watch: Watch = nullcontext) -> int:
    """Run a worker in this process; what keeps it from starting is one line in the log."""
    try:
        process = WorkerProcess(settings, watch)
    except LlamaqError as exc:
        log.error("worker.cannot_start error=%s", exc)
        return EXIT_CANNOT_START
    return process.run()
