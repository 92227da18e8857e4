"""Keeps the engine fed: claims jobs while there is room, starts and prepares them, and hands them to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from redis.exceptions import RedisError

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.keys import JobId
from llamaq.common.scripts import Claim
from llamaq.common.tasks import end_tasks
from llamaq.worker.inbox import Begun, Inbox
from llamaq.worker.jobs import Job, Lease
from llamaq.worker.outbox import Outbox
from llamaq.worker.prepare import Preparer

log = logging.getLogger(__name__)

BLOCK_S = 1.0
"""How long one wait for new entries lasts; lost jobs of other workers are looked for at least as often."""
RETRY_S = 0.5


class Intake:
    """Claims no more jobs than there is room for: the slots and a small window."""

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox,
        preparer: Preparer,
        executor: Executor,
        admit: Callable[[Job], None],
        *,
        capacity: int,
    ) -> None:
        """`admit` hands a job to the engine thread; `executor` is where jobs are prepared."""
        self._inbox = inbox
        self._outbox = outbox
        self._preparer = preparer
        self._executor = executor
        self._admit = admit
        self._capacity = capacity
        self._tasks: set[asyncio.Task[None]] = set()
        self._n_starting = 0
        """Claimed jobs that the outbox does not answer for yet."""

    @property
    def room(self) -> int:
        """How many more jobs may be claimed."""
        return self._capacity - self._outbox.n_running - self._n_starting

    async def run(self) -> None:
        """Claim and begin jobs until cancelled."""
        reclaimed_s = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            if self.room <= 0:
                self._outbox.freed.clear()
                await self._outbox.freed.wait()
                continue
            try:
                claims = []
                if clock() - reclaimed_s >= BLOCK_S:
                    claims = await self._inbox.reclaim(self.room)
                    reclaimed_s = clock()
                claims = claims or await self._inbox.claim(self.room, block_s=BLOCK_S)
            except RedisError as exc:
                log.warning("intake.redis_error error=%r retry_s=%.2f", exc, RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            self._n_starting += len(claims)
            for claim in claims:
                task = asyncio.create_task(self._begin(claim))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _begin(self, claim: Claim) -> None:
        """Start one claimed job. Whatever goes wrong here stays with this job."""
        try:
            begun = await self._inbox.begin(claim)
            lease = self._hold(begun) if begun else None
        except RedisError as exc:
            # The entry stays pending with us; when the lease is over somebody takes it, perhaps we.
            log.warning("job.start_failed id=%s error=%r", claim.job_id, exc)
            return
        finally:
            self._n_starting -= 1
            self._outbox.freed.set()
        if begun is not None and lease is not None:
            await self._prepare(begun, lease)

    def _hold(self, begun: Begun) -> Lease:
        claim, attempt = begun.claim, begun.attempt
        partition = JobId.parse(claim.job_id).partition
        lease = Lease(claim.job_id, partition, claim.stream, claim.entry_id, attempt.number)
        self._outbox.hold(lease, attempt.generated)
        return lease

    async def _prepare(self, begun: Begun, lease: Lease) -> None:
        attempt = begun.attempt
        loop = asyncio.get_running_loop()
        try:
            prepared = await loop.run_in_executor(
                self._executor, self._preparer.prepare, attempt.request, lease, begun.published, attempt.queue_ms
            )
        except JobRejected as exc:
            log.info("job.rejected id=%s code=%s", lease.job_id, exc.code)
            self._outbox.reject(lease, exc)
        except Exception:
            log.exception("job.prepare_crashed id=%s", lease.job_id)
            self._outbox.reject(lease, JobRejected(ErrorCode.INTERNAL, "the worker could not prepare this job"))
        else:
            if self._outbox.open(prepared.job, prepared.texts):
                self._admit(prepared.job)
            else:
                prepared.job.sampler.close()

    async def close(self) -> None:
        """Leave the jobs that are being prepared to the outbox, which hands them back; `run` has ended before."""
        await end_tasks(*self._tasks)
