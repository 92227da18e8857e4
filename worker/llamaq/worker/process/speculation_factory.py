"""Builds the speculation that the settings ask for. It adds drafts to the batches."""

from __future__ import annotations

from llamaq.common.errors import InvalidSettings
from llamaq.worker.core.draft_plan import DraftWork
from llamaq.worker.engine.draft_model import DraftModel
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import MAX_SEQUENCES
from llamaq.worker.process.cache_factory import choose_held_draft_cells
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.scheduling.tokens_ahead.ngram_speculation import NgramSpeculation
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation
from llamaq.worker.settings import WorkerSettings

MAX_DRAFT_TOKENS_OF_TICK = 64
"""Largest number of draft tokens in one batch. Each needs memory for a row of logits."""


def make_speculation(
    settings: WorkerSettings, engine: Engine, draft_model: DraftModel | None = None
) -> Speculation | None:
    """Return the speculation of a worker. None: the worker drafts nothing.

    Args:
        settings: The settings of the worker.
        engine: Verifies the drafts.
        draft_model: The draft model. None: there is none.

    Raises:
        InvalidSettings: The model cannot verify drafts.
    """
    if settings.speculation == "off":
        return None
    if not engine.sequences.can_remove_draft:
        raise InvalidSettings(
            "--speculation (LLAMAQ_SPECULATION): the cells of drafts that are not accepted must be removed one by one, "
            "which this model's memory does not permit. A recurrent state never does; a sliding window does with "
            "--swa-full, --kv-unified and --cache-prompt, if there is a second sequence for each slot: with "
            f"--n-parallel of at most {(MAX_SEQUENCES - 1) // 2}, and --n-batch above twice this number of slots. Use "
            "--speculation off"
        )
    if draft_model is None:
        return NgramSpeculation(engine.vocab.end_tokens, n_draft_tokens(settings))
    return _make_draft_model_speculation(settings, engine, draft_model, n_draft_tokens(settings))


def _make_draft_model_speculation(
    settings: WorkerSettings, engine: Engine, draft_model: DraftModel, max_tokens: int
) -> DraftModelSpeculation:
    """Return the speculation with a draft model. `max_tokens` is the largest number of draft tokens in a tick.

    Raises:
        EngineError: llama.cpp cannot compute a first draft.
    """
    context = draft_model.context
    measured: list[DraftWork] = []
    if settings.warmup:
        draft_model.measure(1)  # slower, because it loads the weights
        measured = [draft_model.measure(n_drafts) for n_drafts in (1, settings.n_parallel)]
    held_cells = choose_held_draft_cells(settings, engine)
    sequences = DraftSequences(settings.n_parallel, context.n_ctx, context.n_vocab, held_cells)
    return DraftModelSpeculation(
        engine.vocab.end_tokens, max_tokens, sequences, max_missing=context.n_batch, measured=measured
    )


def n_draft_tokens(settings: WorkerSettings) -> int:
    """Return the largest number of draft tokens in one batch."""
    if settings.speculation == "off":
        return 0
    return min(settings.n_parallel * settings.draft_max, MAX_DRAFT_TOKENS_OF_TICK)
