"""Keeps the engine fed: claims jobs while there is room, starts and prepares them, and hands them to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.scripts import Claim
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.redis_errors import is_full
from llamaq.worker.broker.inbox import Begun, Inbox
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.core.job import Job, Lease
from llamaq.worker.generation.job_preparer import JobPreparer

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_S = 0.5
"""How long one wait for new entries lasts; lost jobs of other workers, and those that were handed back, are looked for
as often. A stream that moves to another worker stands still for that long at most, and for its prefill."""
MIN_BLOCK_S = 0.01
"""To Redis 0 means for ever."""
RETRY_S = 0.5
PATIENCE_S = 3.0
"""So long what runs here may go on while suspects wait; then it is handed back."""
POLL_S = 0.05
URGENT_POLL_S = 0.1
"""How long an interactive job waits at most until a worker full of bulk jobs sees it."""
START_TIMEOUT_S = 2.0
"""For the starts that are on their way to Redis when the worker stops."""


class Intake:
    """Claims no more jobs than there is room for: the slots and a small window.

    Bulk jobs take no room from interactive ones, for whom they are preempted. What is too much then is handed back.

    A suspect, of which so many workers died that one more is the last, is begun when nothing else runs here, and
    nothing else is claimed before it has stored a token or has ended: who shares its worker would share the blame.
    """

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox,
        preparer: JobPreparer,
        executor: Executor,
        admit: Callable[[Job], None],
        *,
        capacity: int,
        lease_s: float,
        is_alive: Callable[[], bool],
    ) -> None:
        """`admit` hands a job to the engine thread; `executor` is where jobs are prepared.

        Nothing is claimed unless `is_alive` says that the engine ticks.
        """
        self._inbox = inbox
        self._outbox = outbox
        self._preparer = preparer
        self._executor = executor
        self._admit = admit
        self._capacity = capacity
        self._renew_every_s = lease_s / 3
        self._is_alive = is_alive
        self._clock = asyncio.get_running_loop().time
        self._reclaimed_s = -BLOCK_S
        self._patient_until_s: float | None = None
        """Set since suspects take turns here, until other jobs are claimed again."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._trouble = OutageLog(log, "intake")
        self._n_starting = 0
        """Claimed jobs that the outbox does not answer for yet."""

    @property
    def room(self) -> int:
        """How many more jobs may be claimed."""
        return self._capacity - self._outbox.n_running - self._n_starting

    @property
    def urgent_room(self) -> int:
        """How many more interactive jobs may be claimed."""
        return self._capacity - self._outbox.n_urgent - self._n_starting

    async def run(self) -> None:
        """Claim and begin jobs until cancelled."""
        while True:
            if max(self.room, self.urgent_room) <= 0 or not self._is_alive():
                await self._wait_for_news(BLOCK_S)
                continue
            try:
                claims = await self._claim()
            except RedisError as exc:
                self._trouble.note(exc)
                await asyncio.sleep(RETRY_S)
                continue
            if not self._n_starting:
                self._trouble.is_over()
            if claims:
                self._patient_until_s = None
            for claim in claims:
                self._start_soon(claim)

    async def _claim(self) -> list[Claim]:
        """Jobs to begin now: those that other workers lost, or new ones."""
        if self.room <= 0:
            return await self._claim_urgent()
        block_s = self._reclaimed_s + BLOCK_S - self._clock()
        if block_s <= 0:
            lost = await self._inbox.reclaim(self.room)
            self._reclaimed_s = self._clock()
            if lost:
                return await self._take_over(lost)
            block_s = BLOCK_S
        return await self._inbox.claim(self.room, block_s=max(block_s, MIN_BLOCK_S))

    async def _claim_urgent(self) -> list[Claim]:
        """Interactive jobs, while bulk jobs take all the room. To wait in Redis would miss a slot that falls free."""
        claims = await self._inbox.claim_urgent(self.urgent_room)
        if not claims:
            await self._wait_for_news(URGENT_POLL_S)
        return claims

    async def _take_over(self, lost: list[Claim]) -> list[Claim]:
        """Those of the reclaimed jobs that may run beside others.

        If there is a suspect, that one is run, and the rest is handed back, for workers that do not have to wait.
        """
        codes = await asyncio.gather(*(self._inbox.settle(claim) for claim in lost))
        suspects = [claim for claim, code in zip(lost, codes, strict=True) if code == "suspect"]
        others = [claim for claim, code in zip(lost, codes, strict=True) if code == "ok"]
        if not suspects:
            return others
        for claim in (*suspects[1:], *others):
            await self._inbox.hand_back(claim)
        await self._run_apart(suspects[0])
        self._reclaimed_s = -BLOCK_S  # the next one's turn
        return []

    async def _run_apart(self, suspect: Claim) -> None:
        """Begin a suspect when nothing else runs here; returns when it has stored a token or has ended."""
        log.info("job.suspect id=%s beside=%d", suspect.job_id, self._outbox.n_open)
        if not await self._clear_for(suspect):
            return
        begun = await asyncio.shield(self._start_soon(suspect))
        while begun is not None and self._outbox.stored_of(suspect.job_id) == begun.attempt.generated:
            await self._wait_for_news(POLL_S)

    async def _clear_for(self, suspect: Claim) -> bool:
        """Wait until nothing else runs here, and see to it before long; False when the suspect was lost meanwhile."""
        renewed_s = self._clock()
        if self._patient_until_s is None:
            self._patient_until_s = renewed_s + PATIENCE_S
        while self._outbox.n_open or self._n_starting:
            if self._clock() >= self._patient_until_s:
                self._outbox.clear()
            if self._clock() - renewed_s >= self._renew_every_s:
                renewed_s = self._clock()
                if not await self._inbox.renew(suspect):
                    return False
            await self._wait_for_news(POLL_S)
        return await self._inbox.renew(suspect)

    async def _wait_for_news(self, timeout_s: float) -> None:
        """Until a job has left the engine, or so long at most."""
        self._outbox.freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._outbox.freed.wait()

    def _start_soon(self, claim: Claim) -> asyncio.Task[Begun | None]:
        self._n_starting += 1
        return self._spawn(self._start(claim))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, claim: Claim) -> Begun | None:
        """Start one claimed job and have it prepared. Whatever goes wrong here stays with this job."""
        try:
            begun = await self._begin(claim)
            if begun is not None:
                self._spawn(self._prepare(begun, self._hold(begun)))
            return begun
        except RedisError as exc:
            # The entry stays pending with us; when the lease is over somebody takes it, perhaps we.
            log.warning("job.start_failed id=%s error=%r", claim.job_id, exc)
            return None
        finally:
            self._n_starting -= 1
            self._outbox.freed.set()

    async def _begin(self, claim: Claim) -> Begun | None:
        """Begin an attempt. While Redis is full the claim is kept: it takes room here, so that not all are claimed."""
        while True:
            try:
                begun = await self._inbox.begin(claim)
            except ResponseError as exc:
                if not is_full(exc):
                    raise
                self._trouble.note(exc)
            else:
                self._trouble.is_over()
                return begun
            await asyncio.sleep(RETRY_S)
            if not await self._inbox.renew(claim):
                return None

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
        """Leave the jobs that are being prepared to the outbox, which hands them back; `run` has ended before.

        A start that is on its way is waited for: cut off it might have happened, and look like that of a dead worker.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._n_starting:
                    await self._wait_for_news(POLL_S)
        await cancel_tasks(*self._tasks)
