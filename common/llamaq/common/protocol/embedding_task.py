"""Embedding jobs: texts whose embeddings or scores a worker computes, and the result of each text."""

from __future__ import annotations

import sys
from array import array
from enum import StrEnum
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from llamaq.common.protocol.sampling import MAX_TOKEN_ID
from llamaq.common.protocol.wire_model import StrictModel

MAX_INPUTS = 256
MAX_DIMENSIONS = 65_536


class JobKind(StrEnum):
    """What a job computes. The workers of a queue run jobs of one kind."""

    GENERATION = "generation"
    """The continuation of a prompt."""
    EMBEDDING = "embedding"
    """The embeddings of texts."""
    RERANKING = "reranking"
    """How well documents answer a query."""


class Pooling(StrEnum):
    """How the vectors of a text's tokens become the embedding of the text."""

    NONE = "none"
    """Each token keeps its own vector as an embedding."""
    MEAN = "mean"
    """Their mean."""
    CLS = "cls"
    """The vector of the first token."""
    LAST = "last"
    """The vector of the last token."""
    RANK = "rank"
    """A score of the whole text, for models that rerank."""


class Normalization(StrEnum):
    """How an embedding is scaled. Embeddings of single tokens (pooling `none`) and scores are never scaled."""

    EUCLIDEAN = "euclidean"
    """To the Euclidean length 1."""
    TAXICAB = "taxicab"
    """To the sum 1 of the absolute values."""
    MAX_ABSOLUTE = "max_absolute"
    """To the largest absolute value 32,760."""
    NONE = "none"
    """The embedding is not scaled."""


class EmbeddingTask(StrictModel):
    """The input of an embedding job, in place of a prompt."""

    inputs: tuple[
        str | Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)], ...], Field(min_length=1, fail_fast=True)],
        ...,
    ] = Field(
        min_length=1,
        max_length=MAX_INPUTS,
        fail_fast=True,
        description="At most 256 inputs: texts, or lists of token ids. No token is added to token ids. Each input must "
        "fit into one batch of the worker.",
    )
    query: str | None = Field(
        default=None,
        description="If set, the inputs are documents, and the job computes a score of each of them for this query. "
        "Needs a worker with the pooling `rank`.",
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DIMENSIONS,
        description="Number of values of each embedding that are returned, from the first on. If not set: all. Use it "
        "only with models that were trained for it.",
    )
    normalization: Normalization = Field(
        default=Normalization.EUCLIDEAN,
        description="How embeddings are scaled: `euclidean`, `taxicab`, `max_absolute` or `none`. With `dimensions`, "
        "the shortened embedding is scaled.",
    )

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        if self.query is not None and not all(isinstance(each, str) for each in self.inputs):
            raise ValueError("inputs: documents for a query must be texts")
        return self


class Embedding(NamedTuple):
    """What an embedding job computed for one input."""

    n_tokens: int
    """Number of tokens of the input, as the model read it."""
    n_rows: int
    """Number of vectors: 1, or one for each token with the pooling `none`."""
    data: bytes
    """The vectors, one after the other, as 32-bit floating-point numbers, little-endian."""

    @property
    def vector(self) -> list[float]:
        """The embedding of the input. With the pooling `none`, the vectors of all tokens, one after the other."""
        return _floats(self.data).tolist()

    @property
    def vectors(self) -> list[list[float]]:
        """The vectors: one for each token with the pooling `none`, otherwise one."""
        values = self.vector
        n_dimensions = len(values) // self.n_rows
        return [values[start : start + n_dimensions] for start in range(0, len(values), n_dimensions)]

    @property
    def score(self) -> float:
        """The score of a document for the query."""
        return _floats(self.data)[0]


def _floats(data: bytes) -> array[float]:
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
