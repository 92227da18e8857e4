"""Runs suspects: jobs that are one crash away from the dead-letter limit."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from llamaq.common.protocol.script_types import JobEntry
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.job_starts import POLL_S, JobStarts
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.core.job import Lease

log = logging.getLogger(__name__)

MAX_SUSPECT_WAIT_S = 3.0
"""How long a suspect waits for the running jobs to end. Then the running jobs are requeued for other workers."""


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

    async def select_startable(self, reclaimed: list[JobEntry]) -> list[JobEntry]:
        """Return the reclaimed jobs that may run at the same time as other jobs.

        If one of the jobs is a suspect, it runs alone on this worker. The other jobs are requeued, so that they do not
        wait for the suspect.
        """
        codes = await asyncio.gather(*(self._job_claims.check_crash(entry) for entry in reclaimed))
        suspects = [entry for entry, code in zip(reclaimed, codes, strict=True) if code == "suspect"]
        others = [entry for entry, code in zip(reclaimed, codes, strict=True) if code == "ok"]
        if not suspects:
            return others
        for entry in (*suspects[1:], *others):
            await self._job_claims.requeue(entry)
        await self._run_alone(suspects[0])
        return []

    async def _run_alone(self, suspect: JobEntry) -> None:
        """Prepare a suspect when this worker has no other job. Wait until its next token is stored or it has ended."""
        log.info("job.suspect id=%s running=%d", suspect.job_id, self._outbox.n_jobs)
        held = await self._job_claims.claim_job(suspect, at_risk=False)
        if held is None:
            return
        lease = self._starts.register(held)
        if not await self._wait_until_alone(lease):
            return
        claimed = await self._starts.start_alone(replace(suspect, from_attempt=lease.attempt))
        if claimed is None:  # each flush would renew the lease of `held`, and no worker would run the job
            self._outbox.requeue(lease)
        while claimed is not None and self._outbox.n_stored_tokens(suspect.job_id) == claimed.attempt.generated:
            await self._starts.wait_for_room(POLL_S)

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
