"""Runs suspects: jobs that are one crash away from the dead-letter limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from llamaq.common.protocol.script_types import JobEntry
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.job_starts import POLL_S, JobStarts
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.worker_scripts import CrashVerdict
from llamaq.worker.core.job import Lease

log = logging.getLogger(__name__)

MAX_SUSPECT_WAIT_S = 3.0
"""How long a suspect waits for the running jobs to end. Then the running jobs are requeued for other workers."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Reclaimed jobs that this worker may start."""

    entries: Sequence[JobEntry]
    """The entries of the jobs, whose crashes are counted."""
    is_suspect: bool = False
    """Whether there is one entry, that of a suspect."""


class Suspects:
    """Runs each suspect while this worker has no other job.

    A suspect is a job that is one crash away from the dead-letter limit. No other job is claimed until a token of the
    suspect is stored or the suspect has ended. Otherwise a crash that the suspect causes would also count against the
    other jobs.

    Args:
        job_claims: Checks and claims the suspects.
        outbox: Has the jobs of this worker.
        starts: Starts a suspect.
    """

    def __init__(self, job_claims: JobClaims, outbox: Outbox, starts: JobStarts) -> None:
        self._job_claims = job_claims
        self._outbox = outbox
        self._starts = starts
        self._clock = asyncio.get_running_loop().time
        self._deadline_s: float | None = None
        """Time at which the running jobs are requeued, so that a waiting suspect can start. It is set when the first
        suspect begins to wait, and reset to None when other jobs are claimed."""

    def forget_deadline(self) -> None:
        """Start the waiting time of the next suspect from the beginning, because other jobs were claimed."""
        self._deadline_s = None

    async def select_startable(self, reclaimed: Sequence[JobEntry]) -> Reclaimed:
        """Count the crashes of reclaimed jobs, and return the jobs that this worker may start.

        If one of the jobs is a suspect, it is returned alone. The other jobs are requeued, so that they do not wait for
        the suspect. A job whose check fails waits until its lease expires.

        Raises:
            RedisError: The checks of all jobs failed.
        """
        verdicts = await asyncio.gather(*map(self._check, reclaimed))
        errors = [verdict for verdict in verdicts if isinstance(verdict, RedisError)]
        if errors and len(errors) == len(reclaimed):
            raise errors[0]
        suspects = [entry for entry, verdict in zip(reclaimed, verdicts, strict=True) if verdict == "suspect"]
        others = [entry for entry, verdict in zip(reclaimed, verdicts, strict=True) if verdict == "ok"]
        if not suspects:
            return Reclaimed(others)
        await self._requeue_all([*suspects[1:], *others])
        return Reclaimed(suspects[:1], is_suspect=True)

    async def _check(self, entry: JobEntry) -> CrashVerdict | RedisError:
        try:
            return await self._job_claims.check_crash(entry)
        except RedisError as exc:  # the entry stays pending; a worker takes it when its lease has expired
            log.warning("job.crash_check_failed id=%s error=%s", entry.job_id, exc)
            return exc

    async def requeue(self, reclaimed: Reclaimed) -> None:
        """Requeue reclaimed jobs that this worker does not start, because it stops."""
        await self._requeue_all(reclaimed.entries)

    async def _requeue_all(self, entries: Sequence[JobEntry]) -> None:
        await asyncio.gather(*map(self._requeue, entries))

    async def _requeue(self, entry: JobEntry) -> None:
        try:
            await self._job_claims.requeue(entry)
        except RedisError as exc:  # as in `_check`
            log.warning("job.requeue_failed id=%s error=%s", entry.job_id, exc)

    async def run_alone(self, suspect: JobEntry) -> None:
        """Prepare a suspect when this worker has no other job. Wait until its next token is stored or it has ended.

        If the caller is cancelled before the preparation, the suspect is requeued at once.
        """
        log.info("job.suspect id=%s running=%d", suspect.job_id, self._outbox.n_jobs)
        lease = await self._starts.take(self._hold(suspect), self._release)
        if lease is None:
            return
        try:
            is_alone = await self._wait_until_alone(lease)
        except asyncio.CancelledError:
            self._outbox.requeue(lease)
            raise
        if not is_alone:
            return
        claimed = await self._starts.start_alone(replace(suspect, from_attempt=lease.attempt))
        if claimed is None:  # each flush would renew the lease of the held job, and no worker would run the job
            self._outbox.requeue(lease)
        while claimed is not None and self._outbox.n_stored_tokens(suspect.job_id) == claimed.attempt.generated:
            await self._starts.wait_for_room(POLL_S)

    async def _hold(self, suspect: JobEntry) -> Lease | None:
        """Claim a suspect that is not prepared yet, so that its lease is renewed. None: it was not claimed."""
        held = await self._job_claims.claim_job(suspect, at_risk=False)
        return None if held is None else self._starts.register(held)

    async def _release(self, held: Lease) -> None:
        """Requeue a held suspect."""
        self._outbox.requeue(held)

    async def _wait_until_alone(self, held: Lease) -> bool:
        """Wait until this worker has no other job than `held`. Other jobs are requeued after `MAX_SUSPECT_WAIT_S`.

        Returns:
            False when another worker has claimed the held job in the meantime, or the job has ended.
        """
        if self._deadline_s is None:
            self._deadline_s = self._clock() + MAX_SUSPECT_WAIT_S
        while self._outbox.is_registered(held) and (self._outbox.n_jobs > 1 or self._starts.n_starting):
            if self._clock() >= self._deadline_s:
                self._outbox.requeue_all(except_for=held)
            await self._starts.wait_for_room(POLL_S)
        return self._outbox.is_registered(held)

    def __repr__(self) -> str:
        return f"<Suspects deadline_s={self._deadline_s}>"
