"""The queue of jobs that this worker has claimed and that have no slot yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import islice, takewhile

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.kv_cache.prefix_lookup import Candidate, PrefixHit

MAX_OVERTAKEN = 8
"""How often later jobs may overtake one job. After that, no other job is admitted before this job, so its wait is
bounded."""
MAX_COMPARED_JOBS = 16
"""Upper bound on the jobs of one priority whose reusable prefixes are compared for one admission."""
MIN_LEAD_TOKENS = 16
"""A job overtakes the first job only if it can reuse at least this many tokens more than the first job."""


class WaitingQueue:
    """Orders waiting jobs: interactive before bulk, and first come, first served within a priority.

    Jobs of several tenants take turns: the tenant with the fewest running jobs is next. If several tenants have equally
    few, the tenant whose last turn is longest ago is next. So a job does not wait for all jobs of another tenant that
    this worker claimed before it.

    A job may overtake earlier jobs of its tenant if it has a longer reusable prefix. It may overtake any earlier jobs
    for which KV memory has no room. Each job is overtaken at most `MAX_OVERTAKEN` times. After that, no further job is
    admitted before it and the running jobs end, so a large job gets its room.
    """

    def __init__(self) -> None:
        self._jobs: dict[Priority, dict[str, Job]] = {priority: {} for priority in Priority}
        self._tenants: dict[Priority, Counter[str | None]] = {priority: Counter() for priority in Priority}
        """The number of waiting jobs of each tenant that has some."""
        self._n_overtaken: dict[str, int] = {}
        self._last_turns: dict[str | None, int] = {}
        """Maps a tenant to the number of its last turn. Tenants without a waiting job are forgotten at a turn."""
        self._n_turns = 0

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs.values()

    def append(self, job: Job) -> None:
        """Add the job behind all jobs of its priority."""
        self._jobs[job.request.priority][job.id] = job
        self._tenants[job.request.priority][job.request.tenant] += 1

    def put_first(self, job: Job) -> None:
        """Add a preempted job in front of all jobs of its priority."""
        jobs = self._jobs[job.request.priority]
        self._jobs[job.request.priority] = {job.id: job, **jobs}
        self._tenants[job.request.priority][job.request.tenant] += 1

    def find(self, job_id: str) -> Job | None:
        """Return the waiting job with this id. None: no such job waits."""
        return next((jobs[job_id] for jobs in self._jobs.values() if job_id in jobs), None)

    def candidates(
        self,
        has_slot: Callable[[Job], bool],
        find_prefix: Callable[[Job], PrefixHit],
        *,
        running: Collection[Job],
        bulk_first: bool,
    ) -> Iterator[Candidate]:
        """Iterate over the jobs that may be admitted next, in the order in which the scheduler should try them.

        The scheduler tries a job only if there is no room for the earlier ones. The iteration ends after a job that has
        been overtaken `MAX_OVERTAKEN` times. It is invalid after a change of the queue.

        Args:
            has_slot: Returns whether an idle slot exists that the job can use. Jobs without such a slot are skipped.
            find_prefix: Looks up the reusable prefix of a job.
            running: The jobs that have a slot.
            bulk_first: Whether bulk jobs come before interactive jobs.
        """
        in_order = (Priority.BULK, Priority.INTERACTIVE) if bulk_first else (Priority.INTERACTIVE, Priority.BULK)
        for priority in in_order:
            in_turns = self._in_turns(priority, running)
            eligible = list(islice((job for job in in_turns if has_slot(job)), MAX_COMPARED_JOBS))
            for candidate in self._in_order_of_trial(eligible, find_prefix):
                yield candidate
                if self._must_be_next(candidate.job):
                    return

    def _in_turns(self, priority: Priority, running: Collection[Job]) -> Collection[Job]:
        """Return the jobs of one priority in the order of their tenants' turns. Interrupted jobs are first."""
        jobs = self._jobs[priority].values()
        if len(self._tenants[priority]) <= 1:
            return jobs
        n_jobs = Counter(job.request.tenant for job in running)
        places: dict[str, tuple[int, int]] = {}
        for job in jobs:
            tenant = job.request.tenant
            places[job.id] = (n_jobs[tenant], self._last_turns.get(tenant, 0))
            n_jobs[tenant] += 1
            if job.generated_before or job.times.first_slot_s is not None or self._must_be_next(job):
                places[job.id] = (-1, 0)
        return sorted(jobs, key=lambda job: places[job.id])

    def _in_order_of_trial(self, eligible: list[Job], find_prefix: Callable[[Job], PrefixHit]) -> list[Candidate]:
        """Return the job with the clearly longest reusable prefix first, then the others in the given order.

        Only jobs of the tenant whose turn it is are compared.
        """
        if not eligible or self._must_be_next(eligible[0]):
            eligible = eligible[:1]
        candidates = [Candidate(job, find_prefix(job)) for job in eligible]
        own = [one for one in candidates if one.job.request.tenant == candidates[0].job.request.tenant]
        best = max(own, key=lambda candidate: candidate.hit.n_tokens, default=None)
        if best and best.hit.n_tokens >= candidates[0].hit.n_tokens + MIN_LEAD_TOKENS:
            candidates.remove(best)
            candidates.insert(0, best)
        return candidates

    def _must_be_next(self, job: Job) -> bool:
        return self._n_overtaken.get(job.id, 0) >= MAX_OVERTAKEN

    @property
    def interactive(self) -> Collection[Job]:
        """The interactive jobs in their order."""
        return self._jobs[Priority.INTERACTIVE].values()

    def urgent(self) -> Iterator[Job]:
        """Iterate over the interactive jobs for which a bulk job may be preempted, in the order of trial.

        The iteration ends after a job that has been overtaken `MAX_OVERTAKEN` times.
        """
        for job in self.interactive:
            yield job
            if self._must_be_next(job):
                return

    @property
    def bulk(self) -> Collection[Job]:
        """The bulk jobs, the first one first."""
        return self._jobs[Priority.BULK].values()

    def pop(self, job: Job, passed: Collection[Job] = ()) -> None:
        """Remove a job that is admitted, and count the jobs that it overtakes.

        Args:
            job: The admitted job.
            passed: The jobs of any priority that were tried before and for which there was no room.
        """
        ahead = takewhile(lambda other: other is not job, self._jobs[job.request.priority].values())
        for job_id in {other.id for other in (*ahead, *passed)}:
            self._n_overtaken[job_id] = self._n_overtaken.get(job_id, 0) + 1
        self.remove(job)
        self._n_turns += 1
        waiting = self._tenants.values()
        for tenant in [one for one in self._last_turns if not any(one in tenants for tenants in waiting)]:
            del self._last_turns[tenant]
        self._last_turns[job.request.tenant] = self._n_turns

    def remove(self, job: Job) -> None:
        """Remove a job without counting overtaken jobs."""
        priority, tenant = job.request.priority, job.request.tenant
        del self._jobs[priority][job.id]
        self._tenants[priority][tenant] -= 1
        if not self._tenants[priority][tenant]:
            del self._tenants[priority][tenant]
        self._n_overtaken.pop(job.id, None)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the counts of the tenants differ from the jobs."""
        for priority, jobs in self._jobs.items():
            if Counter(job.request.tenant for job in jobs.values()) != self._tenants[priority]:
                raise AssertionError(f"{priority}: the tenants of {len(jobs)} jobs are not {self._tenants[priority]}")

    def __repr__(self) -> str:
        return f"<WaitingQueue {' '.join(f'{name}={len(jobs)}' for name, jobs in self._jobs.items())}>"
