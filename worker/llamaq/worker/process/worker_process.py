"""One worker process: loads the model, connects to Redis, serves its queue, and requeues unfinished jobs at the end."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path

from llamaq.common.errors import LlamaqError, ModelError
from llamaq.common.protocol.queue_and_worker_state import Worker, WorkerCard
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.broker.heartbeat_content import describe_worker
from llamaq.worker.broker.text_command_handler import TextCommandHandler
from llamaq.worker.engine import gguf_vocab
from llamaq.worker.engine.model_files import resolve_model_file
from llamaq.worker.engine.thread_pool import keeping_placement
from llamaq.worker.engine_loop.engine_liveness import EngineLiveness
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.plugins import load_hooks, load_strategy
from llamaq.worker.process.broker_factory import BrokerFactory
from llamaq.worker.process.compiled_modules import has_compiled_ticks
from llamaq.worker.process.core_sharing import share_cores
from llamaq.worker.process.embedding_parts import EmbeddingParts
from llamaq.worker.process.engine_options import computes_on_gpu, rope_options
from llamaq.worker.process.exit_codes import EXIT_CANNOT_START, EXIT_CRASHED, EXIT_FORCED, EXIT_OK
from llamaq.worker.process.free_heap import return_free_heap
from llamaq.worker.process.generation_parts import GenerationParts
from llamaq.worker.process.io_thread import IoThread
from llamaq.worker.process.job_spans import span_hooks
from llamaq.worker.process.model_file_versions import ModelFileVersions
from llamaq.worker.process.model_fingerprint import fingerprint_model
from llamaq.worker.process.model_parts_interface import ModelParts
from llamaq.worker.process.own_metrics import bind_metrics_server
from llamaq.worker.process.process_identity import identify_this_process, make_worker_id
from llamaq.worker.process.requeue_jobs_of_dead_worker import release_dead_neighbours
from llamaq.worker.process.stop_requests import StopRequests, handle_stop_signals
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""Interval in seconds after which Python passes the GIL to a waiting thread. `llama_decode` releases the GIL. When
it returns, the engine thread must acquire the GIL again. With Python's default interval of 5 ms, the engine thread
would wait up to 5 ms while the I/O thread is busy."""

GC_THRESHOLD = 20_000
"""Number of new objects, less those that were freed, after which Python looks for cycles of objects that nothing uses.
With Python's default of 700, this happens after every few jobs, and stops all threads each time."""

Watch = Callable[[EngineLiveness], AbstractContextManager[object]]
"""Returns a context manager that is active while the ticks run."""


class WorkerProcess:
    """All parts of one worker, wired together."""

    def __init__(self, settings: WorkerSettings, watch: Watch = nullcontext, token: str | None = None) -> None:
        """Load the model and create all parts; `run` starts them.

        Args:
            settings: The settings of the worker.
            watch: Observes the engine thread while the tick loop runs.
            token: Part of the worker's id. None: a random token, of a worker without a supervisor.

        Raises:
            ModelError: The model cannot be loaded, or one of its files was replaced meanwhile.
            InvalidSettings: A setting does not fit the model or this machine.
        """
        path = resolve_model_file(settings.model)
        strategy, hooks = load_strategy(settings.batch_strategy, settings.target_itl_ms), load_hooks(settings.hooks)
        log.info("model.loading path=%s shipped=%s", path.name, settings.model is None)
        self._settings = settings
        self._watch = watch
        self._stop_requests = StopRequests(
            self.stop, self._count_running, drain_s=settings.drain_s, is_supervised=token is not None
        )
        self._worker_id = make_worker_id(os.getpid(), token or secrets.token_hex(3))
        chat_template = settings.chat_template_text
        # Before the model is loaded, so that a port in use is reported at once.
        self._metrics = bind_metrics_server(settings, self._describe_state, lambda: self._ticks.liveness.is_alive)
        file_versions = ModelFileVersions(path, settings)
        self._vocab_blob = gguf_vocab.extract_vocab(path, chat_template, settings.metadata_overrides)
        with keeping_placement():
            if settings.embeddings:
                self._parts: ModelParts = EmbeddingParts(path, settings, self._worker_id)
            else:
                self._parts = GenerationParts(path, settings, strategy, self._worker_id)
        self.card = self._make_card(path, chat_template)
        self._check_files(file_versions)
        self._shared = SharedState(Telemetry(hooks, self.card.worker, job_hooks=span_hooks(self.card)))
        self._ticks = self._make_tick_loop()
        self._io_thread = self._make_io_thread()

    # ---- the parts

    def _make_tick_loop(self) -> TickLoop:
        return TickLoop(
            self._parts.scheduler,
            self._parts.engine,
            self._shared,
            drafter=self._parts.drafter,
            hang_s=self._settings.hang_s,
            stream_interval_s=self._settings.stream_interval_ms / 1000,
            capacity=self._settings.capacity,
        )

    def _make_io_thread(self) -> IoThread:
        broker = BrokerFactory(
            self._settings,
            self.card,
            self._vocab_blob,
            self._parts.preparer,
            self._ticks,
            self._shared,
            self._parts.make_slot_commands(self._ticks),
            TextCommandHandler(
                self._parts.engine.vocab,
                context_limit=self.card.context_limit,
                ends_texts=self._settings.embeddings,
            ),
        )
        return IoThread(self._settings, self._worker_id, broker, self._ticks, self._shared)

    def _make_card(self, path: Path, chat_template: str | None) -> WorkerCard:
        """Return the card, which describes this worker to clients and operators.

        Args:
            path: The model file.
            chat_template: The chat template that replaces the one of the model.
        """
        engine = self._parts.engine
        rope = rope_options(self._settings)
        return WorkerCard(
            worker=self._worker_id,
            queue=self._settings.queue,
            model=path.name,
            model_hash=fingerprint_model(path, engine.model.options, rope, chat_template),
            lora=engine.model.lora_scales,
            n_ctx_train=engine.model.n_ctx_train,
            n_vocab=engine.vocab.n_tokens,
            end_tokens=tuple(sorted(engine.vocab.end_tokens)),
            bos_token=_text_of(engine.vocab, engine.vocab.bos),
            eos_token=_text_of(engine.vocab, engine.vocab.eos),
            n_parallel=self._settings.n_parallel,
            quantization=engine.model.quantization,
            chat_template=engine.vocab.chat_template,
            tag_tokens=engine.vocab.tag_tokens,
            vocab_hash=hashlib.sha256(self._vocab_blob).hexdigest(),
            **self._parts.card_fields(),
            **identify_this_process(),
            device=self._device(),
            version=version("llamaq"),
            started_ms=int(time.time() * 1000),
        )

    def _check_files(self, file_versions: ModelFileVersions) -> None:
        """Free the model and raise `ModelError` if one of its files was replaced while it was loaded."""
        try:
            file_versions.check()
        except ModelError:
            self._parts.close()
            self._parts.free_model()
            raise

    def _describe_state(self, now_ms: int) -> Worker:
        return describe_worker(self.card, self._ticks, self._shared.telemetry, now_ms)

    def _core_sharing(self) -> AbstractContextManager[object]:
        """Return a context in which this worker and others share the CPU cores. With a GPU, the cores hardly matter."""
        if self.card.device != "cpu":
            return nullcontext()
        telemetry = self._shared.telemetry
        return share_cores(self._settings, self._ticks.commands, self._parts.set_n_threads, lambda: telemetry.n_ticks)

    def _device(self) -> str:
        """Return the `device` of the worker's card."""
        if not computes_on_gpu(self._settings):
            return "cpu"
        return "all" if self._settings.device is None else str(self._settings.device)

    def run(self) -> int:
        """Serve the queue until SIGTERM, SIGINT or SIGHUP; returns the process's exit code."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return_free_heap()
        gc.freeze()  # so that garbage collections during ticks skip the objects that live as long as the process
        gc.set_threshold(GC_THRESHOLD)
        handle_stop_signals(self._stop_requests.receive)
        try:
            if (error := self._io_thread.start()) is not None:
                return EXIT_CANNOT_START if isinstance(error, LlamaqError) else EXIT_CRASHED
            card = self.card
            ready = (card.worker, card.queue, card.n_parallel, has_compiled_ticks())
            log.info("worker.ready id=%s queue=%s slots=%d compiled=%s", *ready)
            self._ticks.commands.put(self._parts.place_engine_thread)
            with self._watch(self._ticks.liveness), self._metrics, self._core_sharing():
                self._ticks.run()
        except BaseException:
            self._io_thread.has_crashed = True
            raise
        finally:
            self._shut_down()
        if self._io_thread.error is not None:
            return EXIT_CRASHED
        return EXIT_FORCED if self._stop_requests.is_forced else EXIT_OK

    def stop(self, grace_s: float) -> None:
        """Stop claiming jobs. Running jobs may continue for `grace_s` seconds. Then unfinished jobs are requeued."""
        self._io_thread.stop_intake()
        self._ticks.stop(grace_s)

    def _count_running(self) -> int:
        return sum(slot.job_id is not None for slot in self._parts.scheduler.snapshot())

    def _shut_down(self) -> None:
        """Requeue unfinished jobs, save the prefix cache, and free the model."""
        for job in self._parts.scheduler.withdraw_all():
            log.info("job.unfinished id=%s", job.id)
        self._io_thread.close()
        self._parts.close()
        if self._io_thread.await_preparations():
            self._parts.free_model()
        else:  # a thread still reads the model; the process exits when this thread has ended
            log.warning("worker.model_not_freed: a job or a text command is still being prepared")
        log.info("worker.stopped id=%s jobs=%d", self.card.worker, self._shared.telemetry.n_jobs_done)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.card.worker} {self._ticks!r}>"


def _text_of(vocab: Vocab, token: int | None) -> str:
    """Return the text of a token, also of a control token. Empty: there is no token."""
    return "" if token is None else vocab.piece_with_special(token).decode(errors="replace")


def serve(settings: WorkerSettings, watch: Watch = nullcontext, token: str | None = None) -> int:
    """Run a worker in this process and return its exit code. An error that prevents the start is logged in one line."""
    release_dead_neighbours(settings)
    try:
        process = WorkerProcess(settings, watch, token)
    except LlamaqError as exc:
        log.error("worker.cannot_start error=%s", exc)
        return EXIT_CANNOT_START
    return process.run()
