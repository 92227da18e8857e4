"""Decides which embedding jobs have a slot, and which of their texts each tick computes.

It has the same methods as `scheduling.Scheduler`, so `TickLoop` can run both.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, SlotSnapshot
from llamaq.worker.core.job import Lease
from llamaq.worker.core.outputs import JobEnded, Output, SlotAcquired, TickOutcome
from llamaq.worker.embedding.embedding_job import EmbeddingJob, Text, TextBatch, TextResult, measure
from llamaq.worker.scheduling.bulk_share import BulkShare
from llamaq.worker.scheduling.surplus_jobs import surplus_jobs

log = logging.getLogger(__name__)


class EmbeddingScheduler:
    """Runs the embedding jobs of one worker from `submit` to their end.

    Interactive jobs get a slot before bulk jobs, except for the bulk share, and tenants take turns. The jobs with a
    slot share each batch: in turn, every job adds one text, until no text fits. Each tick begins with another job, so
    that a large text does not wait forever. No job is preempted, because the texts of a job take only seconds.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        batch_tokens: int,
        max_texts: int,
        worker: str,
        bulk_share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a scheduler without jobs.

        Args:
            n_slots: Number of jobs that have a slot at the same time.
            batch_tokens: Largest number of tokens in a batch. No text may be longer.
            max_texts: Largest number of texts in a batch.
            worker: The id of this worker, for the stats.
            bulk_share: The part of the slot time that bulk jobs get while interactive jobs could use all slots.
            clock: Returns the time in seconds. Must be monotonic.
        """
        self._slots: list[EmbeddingJob | None] = [None] * n_slots
        self._batch_tokens = batch_tokens
        self._max_texts = max_texts
        self._worker = worker
        self._clock = clock
        self._bulk_share = BulkShare(bulk_share, n_slots)
        self._waiting: list[EmbeddingJob] = []
        self._outputs: list[Output] = []
        self._first_slot = 0
        """The slot that the next batch begins with."""
        self._expired_s = clock()

    # ---- jobs enter and leave

    def submit(self, job: EmbeddingJob) -> None:
        """Add a job. It replaces another attempt of the same job, which has lost its lease."""
        if (replaced := self._find(job.id)) is not None:
            self._remove(replaced)
        job.record_receipt(self._clock())
        self._waiting.append(job)

    def cancel(self, job_id: str) -> bool:
        """End the job as cancelled. Returns False when this worker does not have the job."""
        job = self._find(job_id)
        if job is not None:
            self._end(job, FinishReason.CANCELLED)
        return job is not None

    def release(self, lease: Lease) -> bool:
        """Drop an attempt of a job without a `JobEnded`. Returns False when this worker does not have this attempt."""
        job = self._find(lease.job_id)
        if job is None or job.lease is not lease:
            return False
        self._remove(job)
        log.info("job.released id=%s attempt=%d", lease.job_id, lease.attempt)
        return True

    def withdraw_waiting(self) -> list[EmbeddingJob]:
        """Remove and return all jobs without a slot, so that a stopping worker can requeue them."""
        jobs, self._waiting = self._waiting, []
        return jobs

    def withdraw_surplus(self, n_jobs: int) -> list[EmbeddingJob]:
        """Remove and return waiting bulk jobs, if this worker has more than `n_jobs` jobs; see `surplus_jobs`."""
        n_surplus = len(self._running) + len(self._waiting) - n_jobs
        bulk = (job for job in self._waiting if job.is_bulk)
        withdrawn = surplus_jobs(bulk, n_surplus, n_kept=self._bulk_share.n_slots, now_s=self._clock())
        for job in withdrawn:
            self._remove(job)
        return withdrawn

    def withdraw_all(self) -> list[EmbeddingJob]:
        """Remove and return all jobs, without a `JobEnded`."""
        jobs = [*self._running, *self._waiting]
        for job in jobs:
            self._remove(job)
        return jobs

    # ---- one tick

    def expire(self) -> None:
        """Count the time in slots. End the jobs that have reached their deadline, or had a slot for `timeout_s`."""
        now_s = self._clock()
        for job in self._running:
            job.times.slot_s += now_s - max(self._expired_s, job.times.first_slot_s or 0.0)
        self._expired_s = now_s
        for job in [*self._running, *self._waiting]:
            if job.times.has_expired(now_s, job.request.timeout_s):
                self._end(job, FinishReason.DEADLINE)

    def admit(self) -> None:
        """Give the idle slots to waiting jobs."""
        while self._waiting and None in self._slots:
            job = self._next_waiting()
            self._waiting.remove(job)
            self._slots[self._slots.index(None)] = job
            job.times.gain_slot(self._clock())
            self._outputs.append(SlotAcquired(job))
            log.info("job.admitted id=%s texts=%d prompt_tokens=%d", job.id, len(job.texts), job.n_tokens)

    def move(self, budget_s: float, prefill_token_s: float = 0.0) -> bool:  # noqa: ARG002  # for the other scheduler
        """Move no cells: embeddings leave none behind."""
        return False

    def save_ahead(self) -> bool:
        """Save nothing: embeddings leave no cells behind."""
        return False

    def plan(self, queue_depth: int = 0) -> TextBatch:  # noqa: ARG002
        """Return the batch of the next tick, which is empty when no job has a slot."""
        turns = self._slots[self._first_slot :] + self._slots[: self._first_slot]
        self._first_slot = (self._first_slot + 1) % len(self._slots)
        pending = [(job, iter(job.texts[job.next_text :])) for job in turns if job is not None]
        texts: list[Text] = []
        n_left = self._batch_tokens
        while pending and len(texts) < self._max_texts:
            remaining = []
            for job, following in pending:
                tokens = next(following, None)
                if tokens is None or len(tokens) > n_left or len(texts) == self._max_texts:
                    continue  # the texts of a job keep their order, so this job adds no more
                n_left -= len(tokens)
                texts.append(Text(job, tokens))
                remaining.append((job, following))
            pending = remaining
        return TextBatch(tuple(texts))

    def apply(self, batch: TextBatch, results: Iterable[TextResult]) -> TickOutcome:
        """Store the results, end the jobs that are complete, and return all outputs since the last call."""
        if batch:
            n_bulk = sum(job.is_bulk for job in self._running)
            n_waiting = sum(job.is_bulk for job in self._waiting)
            self._bulk_share.record_tick(len(self._running), n_bulk, n_waiting)
        for result in results:
            job = result.text.job
            if job not in self._slots:
                continue  # an earlier text of the job has failed
            if result.embedding is None:
                self._end(job, error=result.error)
                continue
            job.embeddings.append(result.embedding)
            if job.is_complete:
                self._end(job, FinishReason.STOP)
        return TickOutcome(self.take_outputs())

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call of this method or of `apply`."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- views

    @property
    def repeater(self) -> None:
        """No tick is repeated: each one computes other texts."""

    @property
    def n_prefill_next(self) -> int:
        """Upper bound on the tokens of the next tick."""
        return min(self._batch_tokens, sum(job.n_tokens for job in self._running))

    @property
    def has_work(self) -> bool:
        """Whether the next tick has something to do."""
        return bool(self._running or self._waiting or self._outputs)

    def snapshot(self) -> tuple[SlotSnapshot, ...]:
        """Return the public state of all slots."""
        return tuple(_snapshot(index, job) for index, job in enumerate(self._slots))

    def cache_snapshot(self) -> CacheSnapshot:
        """Return the public state of the KV cells. Each tick uses them anew."""
        return CacheSnapshot(n_cells=self._batch_tokens, reserved_cells=0)

    def __repr__(self) -> str:
        return f"<EmbeddingScheduler {len(self._running)}/{len(self._slots)} slots, {len(self._waiting)} waiting>"

    # ---- jobs

    @property
    def _running(self) -> list[EmbeddingJob]:
        return [job for job in self._slots if job is not None]

    def _next_waiting(self) -> EmbeddingJob:
        """Return the job that gets the next slot: by priority, by its tenant's number of running jobs, by arrival."""
        n_bulk = sum(job.is_bulk for job in self._running)
        bulk_first = self._bulk_share.is_due(n_bulk)
        n_running = Counter(job.request.tenant for job in self._running)
        return min(self._waiting, key=lambda job: (job.is_bulk is not bulk_first, n_running[job.request.tenant]))

    def _find(self, job_id: str) -> EmbeddingJob | None:
        return next((job for job in (*self._running, *self._waiting) if job.id == job_id), None)

    def _remove(self, job: EmbeddingJob) -> None:
        if job in self._slots:
            self._slots[self._slots.index(job)] = None
        else:
            self._waiting.remove(job)

    def _end(self, job: EmbeddingJob, reason: FinishReason | None = None, error: JobRejected | None = None) -> None:
        """Remove the job and add its `JobEnded` to the outputs. Only this method ends jobs."""
        slot = self._slots.index(job) if job in self._slots else None
        stats = measure(job, slot, self._clock(), self._worker)
        embeddings = tuple(job.embeddings) if job.is_complete else None
        self._remove(job)
        self._outputs.append(JobEnded(job, stats, reason=reason, error=error, embeddings=embeddings))
        log.info("job.ended id=%s ending=%s prompt_tokens=%d", job.id, reason or error, stats.prompt_tokens)


def _snapshot(index: int, job: EmbeddingJob | None) -> SlotSnapshot:
    if job is None:
        return SlotSnapshot(index=index, state="idle")
    n_computed = job.n_computed_tokens
    return SlotSnapshot(
        index=index, state="prefill", job_id=job.id, prompt_tokens=job.n_tokens, prefilled_tokens=n_computed
    )
