"""Finds and loads the draft model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from llamaq.common.errors import InvalidSettings
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.draft_plan import STEP_TOKENS
from llamaq.worker.engine.draft_model import DraftModel
from llamaq.worker.engine.draft_vocabulary import check_draft_vocabulary
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import MAX_SEQUENCES, Model
from llamaq.worker.engine.load_options import ContextOptions
from llamaq.worker.engine.model_files import resolve_model_file
from llamaq.worker.process.engine_options import context_options, model_options
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

MAX_MISSING_TOKENS = 256
"""Largest number of tokens of histories that the draft model computes before one tick."""


def find_draft_model(settings: WorkerSettings) -> Path | None:
    """Return the file of the draft model. None: the settings name none.

    Raises:
        ModelError: The file does not exist or cannot be downloaded.
    """
    if settings.model_draft is None:
        return None
    return resolve_model_file(settings.model_draft, setting="--model-draft")


def load_draft_model(path: Path, settings: WorkerSettings, engine: Engine) -> DraftModel:
    """Load the draft model.

    Args:
        path: The file of the draft model.
        settings: The settings of the worker.
        engine: Verifies the drafts.

    Raises:
        ModelError: The model cannot be loaded, or its vocabulary is not that of the engine's model.
        InvalidSettings: The model has recurrent layers, or a sliding window with too many slots.
        EngineError: The context cannot be created.
    """
    options = replace(model_options(settings), n_gpu_layers=settings.n_gpu_layers_draft, override_tensor=())
    model = Model(path, options)
    check_draft_vocabulary(engine.vocab, Vocab.of_model(model.pointer))
    _check_memory(model, settings)
    log.info("draft_model.loaded path=%s", path.name)
    return DraftModel(
        model,
        _context_options(settings, model, engine.context.n_ctx),
        n_vocab=engine.vocab.n_tokens,
        end_tokens=engine.vocab.end_tokens,
        p_min=settings.draft_p_min,
    )


def _check_memory(model: Model, settings: WorkerSettings) -> None:
    """Raise `InvalidSettings` if the tokens of drafts cannot be removed from the memory of the draft model."""
    if model.is_recurrent:
        raise InvalidSettings(
            "--model-draft (LLAMAQ_MODEL_DRAFT): this model has recurrent layers, from which the tokens of drafts "
            "cannot be removed. Choose a model without recurrent layers, or --speculation ngram"
        )
    if _n_sequences(settings, model) > MAX_SEQUENCES:
        raise InvalidSettings(
            f"--model-draft (LLAMAQ_MODEL_DRAFT): this model has a sliding window and needs two sequences for each "
            f"slot; --n-parallel can be at most {(MAX_SEQUENCES - 1) // 2} with it"
        )


def _n_sequences(settings: WorkerSettings, model: Model) -> int:
    """Return the number of sequences: with a sliding window, each slot needs a guard too, see `SwaGuards`."""
    return 2 * settings.n_parallel + 1 if model.n_swa else settings.n_parallel


def _context_options(settings: WorkerSettings, model: Model, n_ctx: int) -> ContextOptions:
    n_sequences = _n_sequences(settings, model)
    n_batch = max(min(MAX_MISSING_TOKENS, settings.batch_budget), STEP_TOKENS * settings.n_parallel, n_sequences)
    n_threads = settings.n_threads_draft or settings.n_threads_alone
    options = context_options(
        settings,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch if model.n_swa else min(n_batch, settings.ubatch_tokens),  # see `fit_to_sliding_window`
        n_seq_max=n_sequences,
        has_scratch_sequence=bool(model.n_swa),
        kv_unified=True,
    )
    return replace(
        options,
        n_threads=n_threads,
        n_threads_batch=settings.n_threads_draft or options.n_threads_batch,
        cache_type_k=settings.cache_type_k_draft,
        cache_type_v=settings.cache_type_v_draft,
        swa_full=True,
    )
