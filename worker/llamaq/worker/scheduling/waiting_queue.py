"""The queue of jobs that this worker has claimed and that have no slot yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.kv_cache.prefix_lookup import Candidate, PrefixHit

MAX_OVERTAKEN = 8
"""How often later jobs may overtake one job. No other worker can claim a waiting job, so the wait must be bounded."""
PROTECTED_TOKENS = 64
"""Number of tokens that a bulk job generates before it can be preempted. Applies to a bulk job that was admitted
because `MAX_OVERTAKEN` interactive jobs had been admitted before it."""
MAX_COMPARED_JOBS = 16
"""Upper bound on the jobs whose reusable prefixes are compared for one admission."""
MIN_LEAD_TOKENS = 16
"""A job overtakes the first job only if it can reuse at least this many tokens more than the first job."""


class WaitingQueue:
    """Orders waiting jobs: interactive before bulk, and first come, first served within a priority.

    There are two exceptions:

    - A job with a long reusable prefix may overtake earlier jobs of its priority. Each job is overtaken in this way at
      most `MAX_OVERTAKEN` times.
    - After `MAX_OVERTAKEN` interactive jobs were admitted while a bulk job waited, the next job is a bulk job.

    `next` does not check whether KV memory has room for the job. If there is no room, the scheduler admits no other job
    in this tick, because small jobs would otherwise starve a large job.
    """

    def __init__(self) -> None:
        self._jobs: dict[Priority, dict[str, Job]] = {priority: {} for priority in Priority}
        self._n_overtaken: dict[str, int] = {}
        """How often a job was overtaken by jobs of its priority."""
        self._n_bulk_overtaken = 0
        """Number of interactive jobs admitted while bulk jobs waited, since the last reset. At `MAX_OVERTAKEN`,
        the next admitted job is a bulk job, and this number is reset to 0."""

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs.values()

    def append(self, job: Job) -> None:
        """Add the job behind all jobs of its priority."""
        self._jobs[job.request.priority][job.id] = job

    def requeue(self, job: Job) -> None:
        """Add a preempted job in front of all jobs of its priority."""
        jobs = self._jobs[job.request.priority]
        self._jobs[job.request.priority] = {job.id: job, **jobs}

    def next(self, has_slot: Callable[[Job], bool], find_prefix: Callable[[Job], PrefixHit]) -> Candidate | None:
        """Return the job to admit next with its reusable prefix, or None. The job stays in the queue.

        Args:
            has_slot: Returns whether an idle slot exists that the job can use. Jobs without such a slot are skipped.
            find_prefix: Looks up the reusable prefix of a job. Called once for each compared job.
        """
        for jobs in self._priorities_by_turn():
            eligible = list(islice((job for job in jobs.values() if has_slot(job)), MAX_COMPARED_JOBS))
            if eligible:
                return self._choose(eligible, find_prefix)
        return None

    def _priorities_by_turn(self) -> list[dict[str, Job]]:
        interactive, bulk = self._jobs[Priority.INTERACTIVE], self._jobs[Priority.BULK]
        return [bulk, interactive] if self._n_bulk_overtaken >= MAX_OVERTAKEN else [interactive, bulk]

    def _choose(self, eligible: list[Job], find_prefix: Callable[[Job], PrefixHit]) -> Candidate:
        if self._n_overtaken.get(eligible[0].id, 0) >= MAX_OVERTAKEN:
            eligible = eligible[:1]
        candidates = [Candidate(job, find_prefix(job)) for job in eligible]
        first, best = candidates[0], max(candidates, key=lambda candidate: candidate.hit.n_tokens)
        return best if best.hit.n_tokens >= first.hit.n_tokens + MIN_LEAD_TOKENS else first

    @property
    def first_interactive(self) -> Job | None:
        """The first interactive job. A bulk job may be preempted for it."""
        return next(iter(self._jobs[Priority.INTERACTIVE].values()), None)

    def pop(self, job: Job) -> None:
        """Remove a job that is admitted, and count the jobs that it overtakes."""
        for other in self._jobs[job.request.priority]:
            if other == job.id:
                break
            self._n_overtaken[other] = self._n_overtaken.get(other, 0) + 1
        self.remove(job)
        if job.request.priority is Priority.BULK and self._n_bulk_overtaken >= MAX_OVERTAKEN:
            job.protected_tokens = len(job.resumed) + PROTECTED_TOKENS
            self._n_bulk_overtaken = 0
        elif job.request.priority is Priority.INTERACTIVE and self._jobs[Priority.BULK]:
            self._n_bulk_overtaken += 1

    def remove(self, job: Job) -> None:
        """Remove a job without counting overtaken jobs."""
        del self._jobs[job.request.priority][job.id]
        self._n_overtaken.pop(job.id, None)

    def __repr__(self) -> str:
        return f"<WaitingQueue {' '.join(f'{name}={len(jobs)}' for name, jobs in self._jobs.items())}>"
