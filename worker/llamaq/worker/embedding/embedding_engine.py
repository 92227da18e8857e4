"""Computes the embeddings of a batch of texts with llama.cpp.

Each text is a separate sequence in a unified memory, and the memory is empty before each batch. A batch is never larger
than llama.cpp computes in one pass. Pooling needs all tokens of a text in one pass. A model whose tokens attend to
later tokens needs this too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import EngineError, ErrorCode, JobRejected
from llamaq.common.protocol.embedding_task import Embedding, EmbeddingTask, Normalization, Pooling
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.embedding.embedding_job import Text, TextBatch, TextResult
from llamaq.worker.engine.llama_bindings import SUCCESS, Context, Model
from llamaq.worker.engine.load_options import ContextOptions

log = logging.getLogger(__name__)

LARGEST = 32_760
"""The largest absolute value of an embedding with `Normalization.MAX_ABSOLUTE`, as in llama.cpp."""

Vector = npt.NDArray[np.float32]


class EmbeddingEngine:
    """One model with one context for embeddings. Not thread-safe, except for `vocab`.

    Args:
        model: The model. `close` closes the model too.
        options: Options of the context, with `embeddings`.

    Raises:
        EngineError: The context cannot be created.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        self.model = model
        self.context = Context(model, options)
        self.vocab = Vocab.of_model(model.pointer)
        self.pooling = self.context.pooling

    def run(self, batch: TextBatch) -> list[TextResult]:
        """Return the embedding of each text of a batch, in their order. If one text fails, the others do not."""
        if (results := self._compute(batch.texts)) is not None:
            return results
        if len(batch.texts) > 1:
            log.error("engine.decode_failed texts=%d: computing them one by one", len(batch.texts))
            return [result for text in batch.texts for result in self._compute([text]) or [_failed(text)]]
        return [_failed(text) for text in batch.texts]

    def warm_up(self) -> None:
        """Compute one token, so that the first batch finds the weights in memory and the kernels of a GPU loaded.

        Raises:
            EngineError: llama.cpp cannot compute it.
        """
        if self._decode([(self.vocab.bos or 0,)]) != SUCCESS:
            raise EngineError("llama.cpp cannot compute the embedding of a first token; see its log for the reason")

    def close(self) -> None:
        """Free the context and the model. May be called twice."""
        self.context.close()
        self.model.close()

    def __repr__(self) -> str:
        return f"<EmbeddingEngine {self.model.description!r} pooling={self.pooling} n_batch={self.context.n_batch}>"

    def _decode(self, texts: Sequence[tuple[int, ...]]) -> int:
        batch = self.context.batch
        batch.clear()
        for seq_id, tokens in enumerate(texts):
            batch.add_text(tokens, seq_id)
        self.context.clear()
        return self.context.decode()

    def _compute(self, texts: Sequence[Text]) -> list[TextResult] | None:
        """Return the result of each text. None: llama.cpp cannot decode the texts together."""
        if self._decode([text.tokens for text in texts]) != SUCCESS:
            return None
        if self.pooling is not Pooling.NONE:
            rows = [self.context.sequence_embedding(seq_id)[np.newaxis] for seq_id in range(len(texts))]
        else:
            ends = np.cumsum([len(text.tokens) for text in texts])
            rows = np.split(self.context.token_embeddings(int(ends[-1])), ends[:-1])
        return [self._result(text, each) for text, each in zip(texts, rows, strict=True)]

    def _result(self, text: Text, rows: npt.NDArray[np.float32]) -> TextResult:
        """Return the result of a text. `rows` has the embedding of the text, or one row for each of its tokens."""
        if not np.isfinite(rows).all():
            message = "the model computed an embedding that is not a number (NaN): its file may be damaged"
            return TextResult(text, error=JobRejected(ErrorCode.DECODE_FAILED, message))
        task = text.job.request.embed
        if task is not None and self.pooling is not Pooling.RANK:
            rows = finish_rows(rows, task, scales=self.pooling is not Pooling.NONE)
        data = np.ascontiguousarray(rows, "<f4").tobytes()
        return TextResult(text, Embedding(len(text.tokens), len(rows), data))


def finish_rows(rows: npt.NDArray[np.float32], task: EmbeddingTask, *, scales: bool) -> npt.NDArray[np.float32]:
    """Return the rows with the dimensions of the task, and, if `scales`, with its normalization."""
    if task.dimensions is not None:
        rows = rows[:, : task.dimensions]
    return np.stack([normalize(row, task.normalization) for row in rows]) if scales else rows


def normalize(vector: Vector, how: Normalization) -> Vector:
    """Return a scaled vector, computed as in llama.cpp (`common_embd_normalize`). A vector of zeros is not changed."""
    length: Any
    match how:
        case Normalization.NONE:
            return vector
        case Normalization.EUCLIDEAN:
            length = np.sqrt(np.square(vector, dtype=np.float64).sum())
        case Normalization.TAXICAB:
            length = np.abs(vector, dtype=np.float64).sum()
        case Normalization.MAX_ABSOLUTE:
            length = np.abs(vector).max() / LARGEST
    return (vector / length).astype(np.float32) if length > 0 else np.zeros_like(vector)


def _failed(text: Text) -> TextResult:
    message = f"llama.cpp cannot compute the embedding of a text of {len(text.tokens)} tokens"
    log.error("engine.job_failed id=%s: %s", text.job.id, message)
    return TextResult(text, error=JobRejected(ErrorCode.DECODE_FAILED, message))
