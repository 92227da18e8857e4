"""The parts of a worker that generates text: KV memory, prefix cache, scheduler, engine and grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamaq.common.errors import InvalidSettings, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.generation.sampling.row_draws import NATIVE_DRAWS, NativeRowDrawer
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.process.cache_factory import (
    choose_held_cells,
    choose_n_sequences,
    make_offload,
    make_prefix_cache,
    make_saved_slot_files,
)
from llamaq.worker.process.draft_model_parts import find_draft_model, load_draft_model
from llamaq.worker.process.engine_options import (
    computes_on_gpu,
    context_limit,
    context_options,
    fit_to_sliding_window,
    load_model,
    n_scored_tokens,
)
from llamaq.worker.process.model_sampling import job_defaults_for_model
from llamaq.worker.process.speculation_factory import make_speculation, n_draft_tokens
from llamaq.worker.process.stop_times import SAVE_TIMEOUT_S
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.slot_files.command_handler import SlotCommandHandler
from llamaq.worker.slot_files.slot_operations import SlotOperations

MAX_DRAW_THREADS = 8
"""The largest number that was measured: the tokens of 32 streams take 0.34 ms with 8 threads, and 0.50 with 4."""


class GenerationParts:
    """The model of a worker that generates text, and the parts that run its jobs.

    Args:
        path: The model file.
        settings: The settings of the worker.
        strategy: Plans the batch of each tick.
        worker: The id of the worker.

    Raises:
        LlamaqError: The model cannot be loaded, or a setting does not fit it.
    """

    def __init__(self, path: Path, settings: WorkerSettings, strategy: BatchStrategy, worker: str) -> None:
        self._path = path
        self._settings = settings
        draft_path = find_draft_model(settings)  # before the model is loaded, which may take minutes
        self.engine = load_engine(path, settings)
        self.drafter = load_draft_model(draft_path, settings, self.engine) if draft_path is not None else None
        self._speculation = make_speculation(settings, self.engine, self.drafter)
        n_cells = self.engine.context.cells_per_sequence
        self._context_limit = context_limit(path, settings, self.engine.model, n_cells)
        self._job_defaults = job_defaults_for_model(settings, self.engine.model.metadata)
        self._grammar_sandbox = GrammarSandbox(self.engine.vocab)
        self._offload = make_offload(settings, self.engine, path)
        self._memory = self._make_memory()
        self.scheduler = self._make_scheduler(strategy, worker)
        self.preparer = self._make_preparer()
        self._slot_commands: SlotCommandHandler | None = None

    def _make_memory(self) -> KvMemory:
        settings, engine = self._settings, self.engine
        pool = SlotPool(
            settings.n_parallel,
            engine.context.n_ctx,
            engine.sequences.n_sequences,
            similarity=settings.slot_prompt_similarity,
            shares_cells=engine.context.kv_unified,
            margin=settings.cell_margin,
        )
        cache, held_cells = make_prefix_cache(settings, engine), choose_held_cells(settings, engine)
        return KvMemory(pool, engine.sequences, cache, self._offload, held_cells=held_cells)

    def _make_scheduler(self, strategy: BatchStrategy, worker: str) -> Scheduler:
        context = self.engine.context
        limits = TickLimits(context.n_batch, self._settings.chunk_size, n_scored_tokens(context.n_vocab))
        return Scheduler(
            self._memory,
            GuardedStrategy(strategy, limits),
            end_tokens=self.engine.vocab.end_tokens,
            worker=worker,
            bulk_share=self._settings.bulk_share,
            speculation=self._speculation,
        )

    def make_slot_commands(self, ticks: TickLoop) -> SlotCommandHandler:
        """Return the handler of the commands of operators about slots."""
        operations = SlotOperations(self._memory, self.engine.sequences, self._offload)
        files = make_saved_slot_files(self._settings, self.engine, self._path)
        self._slot_commands = SlotCommandHandler(ticks.commands, operations, files)
        return self._slot_commands

    def set_n_threads(self, n_threads: int) -> None:
        """Change the number of llama.cpp's threads where the settings leave it open. Call it on the engine thread."""
        n_threads_batch = self._settings.n_threads_batch or n_threads
        self.engine.context.set_n_threads(n_threads, n_threads_batch)
        if self.drafter is not None and self._settings.n_threads_draft is None:
            self.drafter.context.set_n_threads(n_threads, n_threads_batch)

    def place_engine_thread(self) -> None:
        """Let the engine thread, which calls this, run on the CPUs and with the priority of llama.cpp's threads."""
        self.engine.context.place_this_thread()

    def card_fields(self) -> dict[str, Any]:
        """Return the fields of the worker's card that describe the model and its context."""
        return {
            "n_ctx": self.engine.context.n_ctx,
            "context_limit": self._context_limit,
            "job_defaults": self._job_defaults,
            "speculation": self._settings.speculation,
        }

    def close(self) -> None:
        """Save the prefix cache, and end the grammar process. A preparation that waits for a grammar fails."""
        if self._slot_commands is not None:
            self._slot_commands.close()
        self._memory.close(SAVE_TIMEOUT_S)  # after the jobs were requeued, so that other workers run them meanwhile
        self._grammar_sandbox.close()

    def free_model(self) -> None:
        """Free the draft model and the model. No thread may use their vocabularies any more."""
        if self.drafter is not None:
            self.drafter.close()
        self.engine.close()

    def _check_default_grammar(self) -> None:
        defaults = self._job_defaults
        if defaults.grammar:
            try:
                self._grammar_sandbox.check(JobParams(grammar=defaults.grammar, grammar_root=defaults.grammar_root))
            except JobRejected as exc:
                raise InvalidSettings(f"--grammar (LLAMAQ_GRAMMAR): {exc.message}") from exc

    def _make_preparer(self) -> JobPreparer:
        engine = self.engine
        self._check_default_grammar()
        return JobPreparer(
            engine.vocab,
            self._grammar_sandbox,
            self._job_defaults,
            context_limit=self._context_limit,
            max_request_bytes=self._settings.max_request_bytes,
            adapters=engine.model.lora_scales,
            draft_max=0 if self._settings.speculation == "off" else self._settings.draft_max,
            has_draft_model=self.drafter is not None,
            counts_system_tokens=not engine.sequences.can_cut,
            can_score_prompts=not self._settings.backend_sampling,
        )


def load_engine(path: Path, settings: WorkerSettings) -> Engine:
    """Load the model and create its engine.

    Raises:
        ModelError: The model cannot be loaded.
        EngineError: The context cannot be created.
    """
    model = load_model(path, settings)
    settings = fit_to_sliding_window(settings, model)
    n_sequences = choose_n_sequences(settings, model)
    n_rows = settings.n_parallel + n_draft_tokens(settings)
    if not settings.backend_sampling:  # with it, no prompt is scored
        n_rows += n_scored_tokens(model.n_vocab)
    options = context_options(
        settings,
        n_ctx=settings.n_ctx,
        n_batch=settings.batch_budget,
        n_ubatch=settings.ubatch_tokens,
        n_seq_max=n_sequences,
        has_scratch_sequence=n_sequences > settings.n_parallel,
        n_logits=min(n_rows, settings.batch_budget),
        backend_sampling=settings.backend_sampling,
        kv_unified=settings.kv_unified,
    )
    row_drawer = make_row_drawer(settings)
    engine = Engine(model, options, chat_template=settings.chat_template_text, row_drawer=row_drawer)
    if settings.warmup:
        engine.warm_up()
    return engine


def make_row_drawer(settings: WorkerSettings) -> NativeRowDrawer | None:
    """Return what draws the tokens of several rows. None: this worker is not compiled.

    Beside a GPU, cores are free. On a CPU, the threads of llama.cpp still wait actively for the next batch.
    """
    n_threads = min(settings.n_threads_alone, MAX_DRAW_THREADS) if computes_on_gpu(settings) else 1
    return None if NATIVE_DRAWS is None else NativeRowDrawer(NATIVE_DRAWS, n_threads)
