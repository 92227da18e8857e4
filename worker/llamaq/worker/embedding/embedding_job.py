"""An embedding job inside a worker, and the batches that its texts are computed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import BaseJob


@dataclass(slots=True, eq=False)
class EmbeddingJob(BaseJob):
    """A job that can be admitted: its texts are tokenized and checked."""

    texts: tuple[tuple[int, ...], ...]
    """The tokens of each text. No text is empty or longer than a batch."""
    embeddings: list[Embedding] = field(default_factory=list)
    """The embeddings of the first texts, as far as they are computed."""

    @property
    def next_text(self) -> int:
        """Index of the first text whose embedding is not computed."""
        return len(self.embeddings)

    @property
    def is_complete(self) -> bool:
        """Whether all embeddings are computed."""
        return len(self.embeddings) == len(self.texts)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))

    @property
    def n_computed_tokens(self) -> int:
        """Number of tokens of the texts whose embeddings are computed."""
        return sum(each.n_tokens for each in self.embeddings)

    @property
    def is_bulk(self) -> bool:
        """Whether the job is a bulk job."""
        return self.request.priority is Priority.BULK

    def __repr__(self) -> str:
        return f"<EmbeddingJob {self.id} attempt={self.lease.attempt} {self.next_text}/{len(self.texts)} texts>"


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a job in a batch."""

    job: EmbeddingJob
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextBatch:
    """The input of one `llama_decode` call. The texts of a job are in their order."""

    texts: tuple[Text, ...] = ()

    @property
    def n_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    @property
    def n_prefill(self) -> int:
        return self.n_tokens

    @property
    def n_decode(self) -> int:
        return 0

    @property
    def n_drafts(self) -> int:
        return 0

    @property
    def n_drafted(self) -> int:
        return 0

    @property
    def n_forced(self) -> int:
        return 0

    @property
    def n_jobs(self) -> int:
        return len({text.job.id for text in self.texts})

    def __bool__(self) -> bool:
        return bool(self.texts)


@dataclass(frozen=True, slots=True)
class TextResult:
    """The engine's result for one text of a batch. Exactly one of `embedding` and `error` is set."""

    text: Text
    embedding: Embedding | None = None
    error: JobRejected | None = None


def measure(job: EmbeddingJob, slot: int | None, now_s: float, worker: str | None) -> JobStats:
    """Return the stats of a job that ends now.

    Args:
        job: The job.
        slot: Index of its slot. None: it has none.
        now_s: The time on the scheduler's clock.
        worker: The id of this worker.
    """
    duration_s = 0.0 if job.times.first_slot_s is None else now_s - job.times.first_slot_s
    n_computed = job.n_computed_tokens
    return JobStats(
        prompt_tokens=job.n_tokens,
        duration_ms=round(duration_s * 1000, 3),
        prompt_eval_rate=round(n_computed / duration_s, 2) if n_computed and duration_s > 0 else None,
        queue_ms=round(job.times.waited_ms(now_s), 3),
        worker=worker,
        mode="embed",
        seed=job.request.seed,
        slot=slot,
    )
