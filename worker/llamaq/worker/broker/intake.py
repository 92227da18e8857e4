"""The intake: claims jobs while this worker has room, prepares them, and passes them to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import Claim
from llamaq.common.redis.outage_log import OutageLog
from llamaq.worker.broker.job_claims import ClaimedJob, ClaimReply, JobClaims
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.preparations import Preparation, Preparations, Preparer
from llamaq.worker.broker.read_order import Place, ReadOrder
from llamaq.worker.core.job import BaseJob, Lease, PreparedJob
from llamaq.worker.scheduling.bulk_share import BulkShare

log = logging.getLogger(__name__)

BLOCK_S = 0.5
"""Longest wait for new entries in seconds. Between two waits, expired and requeued jobs of other workers are reclaimed.
The output of a job that moves to another worker therefore pauses for up to this time, plus the time of its prefill."""
MIN_BLOCK_S = 0.01
"""The shortest wait for new entries. A wait of 0 blocks without a limit in Redis."""
RETRY_S = 0.5
MAX_SUSPECT_WAIT_S = 3.0
"""How long a suspect waits for the running jobs to end. Then the running jobs are requeued for other workers."""
POLL_S = 0.05
CLAIM_TIMEOUT_S = 2.0
"""How long a stopping worker waits for the replies of Redis to `claim.lua` calls."""


@dataclass(frozen=True, slots=True)
class _Starting:
    """An entry whose job is claimed."""

    claim: Claim
    from_attempt: int | None
    """Number of the attempt that waits for a slot in another worker. None: this worker has taken the entry."""
    place: Place


class Intake:
    """Decides how many jobs this worker claims, and when.

    `JobClaims` claims the jobs in Redis, the preparer makes them ready for the engine, and `Outbox` registers them. The
    outbox also stores in Redis that a job has a slot. Until then the job counts as waiting.

    Jobs that other workers requeued or lost are claimed before new jobs. Without new jobs, a worker with a free slot
    takes jobs that wait for a slot in other workers. Bulk jobs never keep interactive jobs waiting in Redis. A worker
    that is full of bulk jobs still claims interactive jobs. The surplus bulk jobs are then preempted
    or requeued. A worker that is full of interactive jobs still claims the few bulk jobs that `BulkShare` asks for,
    so that the scheduler can give them their share of the slots.

    A suspect is a job that is one crash away from the dead-letter limit. A suspect is prepared only while this
    worker has no other job. No other job is claimed until a token of the suspect is stored or the suspect has ended.
    Otherwise a crash that the suspect causes would also count against the other jobs.

    Threads: all methods run on the I/O thread. Jobs are prepared on the threads of the executor.
    """

    def __init__(
        self,
        job_claims: JobClaims,
        outbox: Outbox,
        preparer: Preparer,
        executor: Executor,
        admit: Callable[[BaseJob], None],
        *,
        n_slots: int,
        capacity: int,
        bulk_share: BulkShare,
        is_alive: Callable[[], bool],
    ) -> None:
        """Create the intake; `run` starts to claim.

        Args:
            job_claims: Claims jobs.
            outbox: Registers claimed jobs and requeues them.
            preparer: Prepares claimed jobs.
            executor: Its threads run the preparer.
            admit: Passes a prepared job to the engine thread, without blocking.
            n_slots: The slots of this worker.
            capacity: Upper bound on the jobs that this worker has claimed at a time: its slots plus a small window.
            bulk_share: Decides how many bulk jobs are claimed although interactive jobs wait.
            is_alive: Returns whether the engine runs ticks. No job is claimed while the engine hangs.
        """
        self._job_claims = job_claims
        self._outbox = outbox
        self._preparations = Preparations(preparer, executor, self._receive_prepared)
        self._admit = admit
        self._capacity = capacity
        self._bulk_share = bulk_share
        self._is_alive = is_alive
        self._clock = asyncio.get_running_loop().time
        self._n_slots = n_slots
        self._reclaimed_s = dict.fromkeys(Priority, -BLOCK_S)
        """When this worker last searched for jobs of each priority to reclaim, and took all jobs that it found."""
        self._moved_s = -BLOCK_S
        self._suspect_deadline_s: float | None = None
        """Time at which the running jobs are requeued, so that a waiting suspect can start. It is set when the first
        suspect begins to wait, and reset to None when other jobs are claimed."""
        self._tasks = BackgroundTasks()
        self._order = ReadOrder()
        self._outage = OutageLog(log, "intake")
        self._n_starting = 0
        """Claimed jobs that are not registered in the outbox yet."""

    @property
    def room(self) -> int:
        """How many more jobs may be claimed."""
        return self._capacity - self._outbox.n_claimed - self._n_starting

    @property
    def interactive_room(self) -> int:
        """How many more interactive jobs may be claimed. Bulk jobs do not count."""
        return self._capacity - self._outbox.n_interactive - self._n_starting

    @property
    def bulk_room(self) -> int:
        """How many bulk jobs may be claimed although interactive jobs fill this worker."""
        return self._bulk_share.n_to_claim(self._outbox.n_claimed - self._outbox.n_interactive + self._n_starting)

    @property
    def n_free_slots(self) -> int:
        """Number of slots that no claimed job will take."""
        return self._n_slots - self._outbox.n_claimed - self._n_starting

    async def run(self) -> None:
        """Claim jobs until cancelled."""
        while True:
            if max(self.room, self.interactive_room, self.bulk_room) <= 0 or not self._is_alive():
                await self._wait_for_room(BLOCK_S)
                continue
            try:
                claims = await self._read()
            except RedisError as exc:
                self._outage.record_failure(exc)
                await asyncio.sleep(RETRY_S)
                continue
            if not self._n_starting:
                self._outage.record_success()
            if claims:
                self._suspect_deadline_s = None
            self._start_soon([(claim, None) for claim in claims])

    # ---- reading entries

    async def _read(self) -> list[Claim]:
        """Return entries whose jobs can be claimed now: first entries of other workers, then new entries."""
        if reclaimed := await self._reclaim():
            return await self._select_startable(reclaimed)
        if self.room <= 0:
            return await self._read_although_full()
        claims = await self._job_claims.read(self.room)
        if not claims and not await self._move_jobs():
            await self._job_claims.wait(self._time_to_reclaim_s(tuple(Priority)))
        return claims

    def _time_to_reclaim_s(self, priorities: Sequence[Priority]) -> float:
        due_s = min(self._reclaimed_s[priority] for priority in priorities) + BLOCK_S
        return max(due_s - self._clock(), MIN_BLOCK_S)

    async def _move_jobs(self) -> bool:
        """Claim jobs that wait for a slot in other workers, if this worker has free slots. Returns whether it claimed
        any.
        """
        if self.n_free_slots <= 0 or self._clock() < self._moved_s + BLOCK_S:
            return False
        self._moved_s = self._clock()
        found = await self._job_claims.movable(self.n_free_slots)
        for claim, _ in found:
            log.info("job.moved_here id=%s", claim.job_id)
        self._start_soon(found)
        return bool(found)

    async def _reclaim(self) -> list[Claim]:
        """Take requeued and expired entries of each priority whose last search is old enough.

        A priority without room is searched as soon as there is room, because such an entry gets the next free slot.
        """
        for priority, room in self._rooms():
            if self._clock() < self._reclaimed_s[priority] + BLOCK_S:
                continue
            claims = await self._job_claims.reclaim(room, [priority])
            if len(claims) < room:
                self._reclaimed_s[priority] = self._clock()
            if claims:
                return claims
        return []

    async def _read_although_full(self) -> list[Claim]:
        """Read new interactive jobs while bulk jobs fill this worker, or new bulk jobs that the bulk share asks for.

        Without such an entry, wait for one, or until a slot becomes free.
        """
        self._outbox.room_freed.clear()
        rooms = self._rooms()
        for priority, room in rooms:
            if claims := await self._job_claims.read(room, [priority]):
                return claims
        if rooms:
            await self._wait_for_room_or_job([priority for priority, _ in rooms])
        return []

    def _rooms(self) -> list[tuple[Priority, int]]:
        """Return the priorities of which jobs may be claimed now, and how many.

        A worker that is full of bulk jobs claims interactive jobs, which do not wait for its bulk jobs. A worker that
        is full of interactive jobs claims the bulk jobs of their share.
        """
        full_rooms = {Priority.INTERACTIVE: self.interactive_room, Priority.BULK: self.bulk_room}
        rooms = full_rooms if self.room <= 0 else dict.fromkeys(Priority, self.room)
        return [(priority, rooms[priority]) for priority in Priority if rooms[priority] > 0]

    async def _wait_for_room(self, timeout_s: float) -> None:
        """Wait until `Outbox.room_freed` is set, at most `timeout_s` seconds."""
        self._outbox.room_freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._outbox.room_freed.wait()

    async def _wait_for_room_or_job(self, priorities: Sequence[Priority]) -> None:
        """Wait until `Outbox.room_freed` is set, a job of these priorities is new, or the next reclaim is due."""
        room = asyncio.create_task(self._outbox.room_freed.wait())
        job = asyncio.create_task(self._job_claims.wait(self._time_to_reclaim_s(priorities), priorities))
        try:
            await asyncio.wait((room, job), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(room, job)

    # ---- suspects

    async def _select_startable(self, reclaimed: list[Claim]) -> list[Claim]:
        """Return the reclaimed jobs that may run at the same time as other jobs.

        If one of the jobs is a suspect, it runs alone on this worker. The other jobs are requeued, so that they do not
        wait for the suspect.
        """
        codes = await asyncio.gather(*(self._job_claims.check_crash(claim) for claim in reclaimed))
        suspects = [claim for claim, code in zip(reclaimed, codes, strict=True) if code == "suspect"]
        others = [claim for claim, code in zip(reclaimed, codes, strict=True) if code == "ok"]
        if not suspects:
            return others
        for claim in (*suspects[1:], *others):
            await self._job_claims.requeue(claim)
        await self._run_alone(suspects[0])
        self._reclaimed_s = dict.fromkeys(Priority, -BLOCK_S)  # reclaim the next suspect at once
        return []

    async def _run_alone(self, suspect: Claim) -> None:
        """Prepare a suspect when this worker has no other job. Wait until its next token is stored or it has ended."""
        log.info("job.suspect id=%s running=%d", suspect.job_id, self._outbox.n_jobs)
        held = await self._job_claims.claim_job(suspect, at_risk=False)
        if held is None:
            return
        lease = self._register(held)
        if not await self._wait_until_alone(lease):
            return
        (starting,) = self._enter([(suspect, lease.attempt)])
        claimed = await asyncio.shield(self._tasks.start(self._start_one(starting)))
        while claimed is not None and self._outbox.n_stored_tokens(suspect.job_id) == claimed.attempt.generated:
            await self._wait_for_room(POLL_S)

    async def _wait_until_alone(self, held: Lease) -> bool:
        """Wait until this worker has no other job than `held`. Other jobs are requeued after `MAX_SUSPECT_WAIT_S`.

        Returns:
            False when another worker has claimed the held job in the meantime, or the job has ended.
        """
        if self._suspect_deadline_s is None:
            self._suspect_deadline_s = self._clock() + MAX_SUSPECT_WAIT_S
        while self._outbox.is_registered(held) and (self._outbox.n_jobs > 1 or self._n_starting):
            if self._clock() >= self._suspect_deadline_s:
                self._outbox.requeue_all(except_for=held)
            await self._wait_for_room(POLL_S)
        return self._outbox.is_registered(held)

    # ---- claiming

    def _start_soon(self, claims: Sequence[tuple[Claim, int | None]]) -> None:
        """Claim the jobs of entries in the background, those of each partition together."""
        partitions: dict[int, list[_Starting]] = {}
        for starting in self._enter(claims):
            partitions.setdefault(JobId.parse(starting.claim.job_id).partition, []).append(starting)
        for group in partitions.values():
            self._tasks.start(self._start(group))

    def _enter(self, claims: Sequence[tuple[Claim, int | None]]) -> list[_Starting]:
        self._n_starting += len(claims)
        return [_Starting(claim, attempt, self._order.enter(claim.priority)) for claim, attempt in claims]

    async def _start(self, group: list[_Starting]) -> None:
        """Claim jobs of one partition, and begin to prepare them."""
        n_done = 0
        try:
            while n_done < len(group):
                rest = group[n_done:]
                replies = await self._job_claims.claim_jobs([(one.claim, one.from_attempt) for one in rest])
                n_done += len(replies)
                self._begin_all(list(zip(rest, replies, strict=False)))
        except RedisError as exc:
            # The entries stay pending. A worker takes them when their leases have expired.
            for starting in group[n_done:]:
                log.warning("job.claim_failed id=%s error=%r", starting.claim.job_id, exc)
        finally:
            for starting in group[n_done:]:
                self._leave(starting)

    def _begin_all(self, replies: Sequence[tuple[_Starting, ClaimReply]]) -> None:
        """Begin to prepare the claimed jobs. What needs more calls of Redis is done in the background."""
        claimed = []
        for starting, reply in replies:
            if reply.claimed is not None:
                claimed.append((starting, reply.claimed))
            else:
                self._tasks.start(self._complete(starting, reply))
        self._begin(claimed)

    async def _complete(self, starting: _Starting, reply: ClaimReply) -> ClaimedJob | None:
        """Begin to prepare a job that earlier attempts have begun, or handle an entry whose job was not claimed."""
        claimed = None
        try:
            claimed = await self._job_claims.complete(reply)
        except RedisError as exc:
            log.warning("job.claim_failed id=%s error=%r", starting.claim.job_id, exc)
        finally:
            if claimed is None:
                self._leave(starting)
        if claimed is not None:
            self._begin([(starting, claimed)])
        return claimed

    async def _start_one(self, starting: _Starting) -> ClaimedJob | None:
        """Claim one job and begin to prepare it. Returns None if it was not claimed."""
        try:
            (reply,) = await self._job_claims.claim_jobs([(starting.claim, starting.from_attempt)])
        except BaseException as exc:
            self._leave(starting)
            if not isinstance(exc, RedisError):
                raise
            log.warning("job.claim_failed id=%s error=%r", starting.claim.job_id, exc)
            return None
        return await self._complete(starting, reply)

    def _begin(self, claimed: Sequence[tuple[_Starting, ClaimedJob]]) -> None:
        """Register claimed jobs, and prepare them on the executor."""
        self._preparations.add([Preparation(one, self._register(one), starting.place) for starting, one in claimed])
        self._n_starting -= len(claimed)
        self._outbox.room_freed.set()

    def _leave(self, starting: _Starting) -> None:
        """Forget an entry whose job was not claimed."""
        self._order.leave(starting.place)
        self._n_starting -= 1
        self._outbox.room_freed.set()

    def _register(self, claimed: ClaimedJob) -> Lease:
        claim, attempt = claimed.claim, claimed.attempt
        partition = JobId.parse(claim.job_id).partition
        lease = Lease(claim.job_id, partition, claim.stream, claim.entry_id, attempt.number)
        self._outbox.register(lease, attempt, claimed.times)
        return lease

    # ---- prepared jobs

    def _receive_prepared(self, preparations: Sequence[Preparation]) -> None:
        """Pass prepared jobs to the engine, or reject them.

        If jobs wait for slots, the jobs that were read before a job come first.
        """
        is_ordered = self.n_free_slots < 0
        for one in preparations:
            if not isinstance(one.outcome, PreparedJob):
                self._reject(one)
                self._order.leave(one.place)
            elif is_ordered and not self._order.is_first(one.place):
                self._tasks.start(self._admit_in_turn(one.outcome, one.place))
            else:
                self._admit_now(one.outcome, one.place)

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
        self._admit_now(prepared, place)

    def _admit_now(self, prepared: PreparedJob, place: Place) -> None:
        """Pass a prepared job to the engine, unless its lease was lost."""
        is_admitted = False
        try:
            is_admitted = self._outbox.set_prepared(prepared.job, prepared.texts)
        finally:
            if not is_admitted:
                prepared.job.close()
            self._order.leave(place)
        if is_admitted:
            self._admit(prepared.job)

    async def close(self) -> None:
        """Stop preparing jobs. Call this after `run` has ended and before `Outbox.close`, which requeues these jobs.

        First waits for the replies to unfinished calls of `claim.lua`. If a reply were lost, Redis could have recorded
        a claim without this worker's knowledge. Such a job would look like a job of a crashed worker.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                while self._n_starting:
                    await self._wait_for_room(POLL_S)
        self._preparations.close()
        await self._tasks.cancel()

    def __repr__(self) -> str:
        return f"<Intake room={self.room} starting={self._n_starting}>"
