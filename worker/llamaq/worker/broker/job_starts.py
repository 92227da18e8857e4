"""Starts jobs: claims the jobs of entries that were read, prepares them, and passes them to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.script_types import JobEntry
from llamaq.worker.broker.job_claims import ClaimedJob, ClaimReply, JobClaims
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.preparations import Preparation, Preparations, Preparer
from llamaq.worker.broker.read_order import Place, ReadOrder
from llamaq.worker.core.job import BaseJob, Lease, PreparedJob

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.05
CLAIM_TIMEOUT_S = 2.0
"""How long a stopping worker waits for the replies of Redis to calls that take or claim jobs."""


@dataclass(frozen=True, slots=True)
class _Starting:
    """An entry whose job is being started."""

    entry: JobEntry
    place: Place


class JobStarts:
    """Brings jobs from their stream entries to the engine.

    `JobClaims` claims the jobs in Redis, the preparer makes them ready for the engine, and `Outbox` registers them.

    Threads: all methods run on the I/O thread. The threads of the executor prepare jobs that take long.
    """

    def __init__(
        self,
        job_claims: JobClaims,
        outbox: Outbox,
        preparer: Preparer,
        executor: Executor,
        admit: Callable[[Sequence[BaseJob]], None],
        n_slots: int,
    ) -> None:
        """Create the object on the running event loop.

        Args:
            job_claims: Claims jobs.
            outbox: Registers claimed jobs.
            preparer: Prepares claimed jobs.
            executor: Its threads prepare jobs that take long.
            admit: Passes prepared jobs to the engine thread. Takes a tenth of a millisecond at most.
            n_slots: The slots of this worker.
        """
        self._job_claims = job_claims
        self._outbox = outbox
        self._preparations = Preparations(preparer, executor, self._receive_prepared)
        self._admit = admit
        self._n_slots = n_slots
        self._calls = BackgroundTasks()
        """Calls of Redis that take or claim jobs. Each ends when these jobs are starting, registered or requeued."""
        self._tasks = BackgroundTasks()
        self._order = ReadOrder()
        self.n_starting = 0
        """Entries whose jobs are not registered in the outbox yet."""

    @property
    def n_free_slots(self) -> int:
        """Number of slots that no claimed job will take."""
        return self._n_slots - self._outbox.n_claimed - self.n_starting

    async def wait_for_room(self, timeout_s: float) -> None:
        """Wait until `Outbox.room_freed` is set, at most `timeout_s` seconds."""
        self._outbox.room_freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._outbox.room_freed.wait()

    # ---- claiming

    async def start_read(self, read: Coroutine[Any, Any, list[ClaimReply]]) -> bool:
        """Begin to prepare the jobs that a call of `JobClaims.read` claims. Returns whether there are any.

        If the caller is cancelled, the call continues, and `close` waits for it. If its reply were lost, Redis could
        have recorded a claim without this worker's knowledge.
        """
        return await asyncio.shield(self._calls.start(self._await_read(read)))

    async def _await_read(self, read: Coroutine[Any, Any, list[ClaimReply]]) -> bool:
        replies = await read
        if replies:
            starting = self._enter([reply.entry for reply in replies])
            self._prepare_claimed(list(zip(starting, replies, strict=True)))
        return bool(replies)

    async def take(
        self, call: Coroutine[Any, Any, T | None], requeue: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T | None:
        """Await a call that takes jobs of other workers, and return its result.

        If the caller is cancelled, the call continues, and its jobs are requeued at once. `close` waits for both. If
        the result were lost, the jobs would wait for their leases, although other workers have free slots.

        Args:
            call: Takes jobs. None: it has taken none.
            requeue: Requeues the jobs of a result.
        """
        taking = self._calls.start(call)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._calls.start(self._requeue_taken(taking, requeue))
            raise

    async def _requeue_taken(
        self, taking: asyncio.Task[T | None], requeue: Callable[[T], Coroutine[Any, Any, None]]
    ) -> None:
        with suppress(RedisError):  # the call has taken no job, or the leases of its jobs expire
            if (taken := await taking) is not None:
                await requeue(taken)

    def start_soon(self, entries: Sequence[JobEntry]) -> None:
        """Claim the jobs of entries in the background, those of each partition together."""
        partitions: dict[int, list[_Starting]] = {}
        for starting in self._enter(entries):
            partitions.setdefault(starting.entry.partition, []).append(starting)
        for group in partitions.values():
            self._tasks.start(self._claim_group(group))

    def _enter(self, entries: Sequence[JobEntry]) -> list[_Starting]:
        self.n_starting += len(entries)
        return [_Starting(entry, self._order.enter(entry.priority)) for entry in entries]

    async def _claim_group(self, group: Sequence[_Starting]) -> None:
        """Claim jobs of one partition, and begin to prepare them."""
        while group and (replies := await self._claim_first(group)):
            self._prepare_claimed(list(zip(group, replies, strict=False)))
            group = group[len(replies) :]

    async def _claim_first(self, group: Sequence[_Starting]) -> list[ClaimReply]:
        """Claim the first jobs of one partition, as many as Redis claims in one call. If it fails, forget all of them.

        Then the entries stay pending. A worker takes them when their leases have expired.
        """
        replies: list[ClaimReply] = []
        try:
            replies = await self._job_claims.claim_jobs([one.entry for one in group])
        except RedisError as exc:
            for starting in group:
                log.warning("job.claim_failed id=%s error=%s", starting.entry.job_id, exc)
        finally:
            if not replies:
                for starting in group:
                    self._leave(starting)
        return replies

    def _prepare_claimed(self, replies: Sequence[tuple[_Starting, ClaimReply]]) -> None:
        """Begin to prepare the claimed jobs. Replies that need more calls of Redis are completed in the background."""
        claimed = []
        for starting, reply in replies:
            if reply.claimed is not None:
                claimed.append((starting, reply.claimed))
            else:
                self._tasks.start(self._complete(starting, reply))
        self._prepare(claimed)

    async def _complete(self, starting: _Starting, reply: ClaimReply) -> ClaimedJob | None:
        """Begin to prepare a job that earlier attempts have begun, or handle an entry whose job was not claimed."""
        claimed = None
        try:
            claimed = await self._job_claims.complete(reply)
        except RedisError as exc:
            log.warning("job.claim_failed id=%s error=%s", starting.entry.job_id, exc)
        finally:
            if claimed is None:
                self._leave(starting)
        if claimed is not None:
            self._prepare([(starting, claimed)])
        return claimed

    async def start_alone(self, entry: JobEntry) -> ClaimedJob | None:
        """Claim one job and begin to prepare it, even if the caller is cancelled. None: it was not claimed."""
        (starting,) = self._enter([entry])
        return await asyncio.shield(self._tasks.start(self._claim_alone(starting)))

    async def _claim_alone(self, starting: _Starting) -> ClaimedJob | None:
        """Claim one job and begin to prepare it. Returns None if it was not claimed."""
        replies = await self._claim_first([starting])
        return await self._complete(starting, replies[0]) if replies else None

    def _prepare(self, claimed: Sequence[tuple[_Starting, ClaimedJob]]) -> None:
        """Register claimed jobs, and prepare them."""
        preparations = [Preparation(one, self.register(one), starting.place) for starting, one in claimed]
        self.n_starting -= len(claimed)
        self._outbox.room_freed.set()
        self._preparations.add(preparations)

    def _leave(self, starting: _Starting) -> None:
        """Forget an entry whose job was not claimed."""
        self._order.leave(starting.place)
        self.n_starting -= 1
        self._outbox.room_freed.set()

    def register(self, claimed: ClaimedJob) -> Lease:
        """Register a claimed job in the outbox, and return its lease."""
        entry, attempt = claimed.entry, claimed.attempt
        lease = Lease(entry.job_id, entry.partition, entry.stream, entry.entry_id, attempt.number)
        self._outbox.register(lease, attempt, claimed.times)
        return lease

    # ---- prepared jobs

    def _receive_prepared(self, preparations: Sequence[Preparation]) -> None:
        """Pass prepared jobs to the engine, or reject them.

        If jobs wait for slots, the jobs that were read before a job come first.
        """
        is_ordered = self.n_free_slots < 0
        admitted: list[BaseJob] = []
        try:
            for one in preparations:
                if not isinstance(one.outcome, PreparedJob):
                    self._reject(one)
                    self._order.leave(one.place)
                elif is_ordered and not self._order.is_first(one.place):
                    self._tasks.start(self._admit_in_turn(one.outcome, one.place))
                elif self._register_prepared(one.outcome, one.place):
                    admitted.append(one.outcome.job)
        finally:
            self._admit(admitted)

    def _reject(self, one: Preparation) -> None:
        error = one.outcome
        if isinstance(error, JobRejected):
            log.info("job.rejected id=%s code=%s", one.lease.job_id, error.code)
        else:
            log.error(
                "job.prepare_crashed id=%s", one.lease.job_id, exc_info=error if isinstance(error, Exception) else None
            )
            error = JobRejected(ErrorCode.INTERNAL, "the worker could not prepare this job")
        self._outbox.reject(one.lease, error)

    async def _admit_in_turn(self, prepared: PreparedJob, place: Place) -> None:
        """Pass a prepared job to the engine after the jobs that were read before it."""
        try:
            await self._order.wait_turn(place)
        except BaseException:
            prepared.job.close()
            self._order.leave(place)
            raise
        if self._register_prepared(prepared, place):
            self._admit([prepared.job])

    def _register_prepared(self, prepared: PreparedJob, place: Place) -> bool:
        """Register a prepared job in the outbox. Returns whether the engine shall have it: its lease was not lost."""
        is_registered = False
        try:
            is_registered = self._outbox.set_prepared(prepared)
        finally:
            if not is_registered:
                prepared.job.close()
            self._order.leave(place)
        return is_registered

    async def close(self) -> None:
        """Stop preparing jobs. Call this after `Intake.run` has ended, and before `Outbox.close`, which requeues them.

        First waits for the replies to unfinished calls that take or claim jobs. If a reply were lost, Redis could have
        recorded a claim without this worker's knowledge. Such a job would look like a job of a crashed worker.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                while self.n_starting or self._calls:
                    await self.wait_for_room(POLL_S)
        self._preparations.close()
        await self._calls.cancel()
        await self._tasks.cancel()

    def __repr__(self) -> str:
        return f"<JobStarts starting={self.n_starting}>"
