"""The parts of a worker that computes embeddings: scheduler and engine. It needs no prefix cache and no grammars."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.embedding_task import Pooling
from llamaq.worker.embedding.embedding_engine import EmbeddingEngine
from llamaq.worker.embedding.embedding_preparer import EmbeddingPreparer
from llamaq.worker.embedding.embedding_scheduler import EmbeddingScheduler
from llamaq.worker.engine.gguf_vocab import has_classifier
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.process.engine_options import context_limit, context_options, load_model
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.slot_files.no_slot_states import NoSlotStates

log = logging.getLogger(__name__)

MAX_TEXTS = 64
"""Largest number of texts in a batch. A further sequence costs memory for each token of the vocabulary."""


class EmbeddingParts:
    """The model of a worker that computes embeddings or scores, and the parts that run its jobs.

    Args:
        path: The model file.
        settings: The settings of the worker.
        worker: The id of the worker.

    Raises:
        LlamaqError: The model cannot be loaded, or a setting does not fit it.
    """

    drafter = None
    """An embedding needs no drafts."""

    def __init__(self, path: Path, settings: WorkerSettings, worker: str) -> None:
        model = load_model(path, settings)
        self.max_tokens = context_limit(path, settings, model, settings.embedding_batch_tokens)
        self._n_threads_batch = settings.n_threads_batch
        self.engine = load_embedding_engine(model, settings, self.max_tokens)
        if self.engine.pooling is Pooling.RANK and not has_classifier(path):
            self.engine.close()
            raise InvalidSettings(
                "--pooling (LLAMAQ_POOLING): rank needs a model for reranking; this model has no classification head"
            )
        if self.engine.pooling is Pooling.NONE:
            log.warning(
                "embeddings.not_pooled: each token gets an embedding; --pooling mean or last gives one embedding "
                "for each text"
            )
        self.scheduler = EmbeddingScheduler(
            n_slots=settings.n_parallel,
            batch_tokens=self.engine.context.n_batch,
            max_texts=self.engine.context.n_seq_max,
            worker=worker,
            bulk_share=settings.bulk_share,
        )
        self.preparer = EmbeddingPreparer(
            self.engine.vocab,
            pooling=self.engine.pooling,
            n_embd=model.n_embd,
            max_tokens=self.max_tokens,
            max_request_bytes=settings.max_request_bytes,
        )

    def make_slot_commands(self, ticks: TickLoop) -> NoSlotStates:
        """Return a handler that only lists the slots, because an embedding leaves no state that could be saved."""
        return NoSlotStates(ticks)

    def set_n_threads(self, n_threads: int) -> None:
        """Change the number of llama.cpp's threads where the settings leave it open. Call it on the engine thread."""
        self.engine.context.set_n_threads(n_threads, self._n_threads_batch or n_threads)

    def place_engine_thread(self) -> None:
        """Let the engine thread, which calls this, run on the CPUs and with the priority of llama.cpp's threads."""
        self.engine.context.place_this_thread()

    def card_fields(self) -> dict[str, Any]:
        """Return the fields of the worker's card that describe the model and its context."""
        return {
            "n_ctx": self.max_tokens,
            "context_limit": self.max_tokens,
            "kind": self.preparer.kind,
            "pooling": self.engine.pooling,
            "n_embd": self.engine.model.n_embd,
        }

    def close(self) -> None:
        """Do nothing: an embedding leaves no state that could be saved."""

    def free_model(self) -> None:
        """Free the model. No thread may use its vocabulary any more."""
        self.engine.close()


def load_embedding_engine(model: Model, settings: WorkerSettings, batch_tokens: int) -> EmbeddingEngine:
    """Create the engine.

    Raises:
        EngineError: The context cannot be created.
    """
    # In a recurrent model, each sequence takes memory for a whole state.
    n_texts = settings.n_parallel if model.is_recurrent else MAX_TEXTS
    options = context_options(
        settings,
        n_ctx=batch_tokens,
        n_batch=batch_tokens,
        n_ubatch=batch_tokens,
        n_seq_max=min(n_texts, batch_tokens),
        has_scratch_sequence=False,
        kv_unified=True,
        embeddings=True,
        pooling=settings.pooling,
    )
    engine = EmbeddingEngine(model, options)
    if settings.warmup:
        engine.warm_up()
    return engine
