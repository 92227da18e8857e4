"""The intake: claims jobs while this worker has room, prepares them, and passes them to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_request import Priority
from llamaq.common.redis.outage_log import OutageLog
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.job_starts import JobStarts
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.suspects import Reclaimed, Suspects
from llamaq.worker.scheduling.bulk_share import BulkShare

log = logging.getLogger(__name__)

SEARCH_EVERY_S = 0.5
"""Interval of the searches for jobs of other workers: expired jobs, requeued jobs and jobs that wait for a slot. The
output of a job that moves to another worker therefore pauses for up to this time, plus the time of its prefill. A wait
for new entries ends when the next search is due."""
SHORTEST_WAIT_S = 0.01
"""The shortest wait for new entries. A wait of 0 blocks without a limit in Redis."""
LONGEST_WAIT_S = 0.5
"""Longest wait for room in seconds. After it, the worker checks again whether the engine hangs."""
RETRY_S = 0.5


class Intake:
    """Decides how many jobs this worker claims, and when.

    `JobClaims` claims the jobs in Redis, `JobStarts` makes them ready for the engine, and `Outbox` registers them. The
    outbox also stores in Redis that a job has a slot. Until then the job counts as waiting.

    Jobs that other workers requeued or lost are claimed before new jobs. Without new jobs, a worker with a free slot
    takes jobs that wait for a slot in other workers. Bulk jobs never keep interactive jobs waiting in Redis. A worker
    that is full of bulk jobs still claims interactive jobs. The surplus bulk jobs are then preempted or requeued. A
    worker that is full of interactive jobs still claims the few bulk jobs that `BulkShare` asks for, so that the
    scheduler can give them their share of the slots.

    Threads: all methods run on the I/O thread.
    """

    def __init__(
        self,
        job_claims: JobClaims,
        outbox: Outbox,
        starts: JobStarts,
        *,
        capacity: int,
        bulk_share: BulkShare,
        is_alive: Callable[[], bool],
    ) -> None:
        """Create the intake; `run` starts to claim.

        Args:
            job_claims: Claims jobs.
            outbox: Knows how many jobs this worker has claimed, and requeues jobs.
            starts: Starts claimed jobs.
            capacity: Upper bound on the jobs that this worker has claimed at a time: its slots plus a small window.
            bulk_share: Decides how many bulk jobs are claimed although interactive jobs wait.
            is_alive: Returns whether the engine runs ticks. No job is claimed while the engine hangs.
        """
        self._job_claims = job_claims
        self._outbox = outbox
        self._starts = starts
        self._suspects = Suspects(job_claims, outbox, starts)
        self._capacity = capacity
        self._bulk_share = bulk_share
        self._is_alive = is_alive
        self._clock = asyncio.get_running_loop().time
        self._reclaimed_s = dict.fromkeys(Priority, -SEARCH_EVERY_S)
        """For each priority: when a search last found fewer jobs to reclaim than this worker had room for."""
        self._moved_s = -SEARCH_EVERY_S
        self._outage = OutageLog(log, "intake")

    @property
    def room(self) -> int:
        """How many more jobs may be claimed."""
        return self._capacity - self._outbox.n_claimed - self._starts.n_starting

    @property
    def interactive_room(self) -> int:
        """How many more interactive jobs may be claimed. Bulk jobs do not count."""
        return self._capacity - self._outbox.n_interactive - self._starts.n_starting

    @property
    def bulk_room(self) -> int:
        """How many bulk jobs may be claimed although interactive jobs fill this worker."""
        return self._bulk_share.n_to_claim(
            self._outbox.n_claimed - self._outbox.n_interactive + self._starts.n_starting
        )

    async def run(self) -> None:
        """Claim jobs until cancelled."""
        while True:
            if max(self.room, self.interactive_room, self.bulk_room) <= 0 or not self._is_alive():
                await self._starts.wait_for_room(LONGEST_WAIT_S)
                continue
            try:
                has_started = await self._start_jobs()
            except RedisError as exc:
                self._outage.record_failure(exc)
                await asyncio.sleep(RETRY_S)
                continue
            if not self._starts.n_starting:
                self._outage.record_success()
            if has_started:
                self._suspects.forget_deadline()

    # ---- jobs to start

    async def _start_jobs(self) -> bool:
        """Start the jobs that can be claimed now: first those of other workers, then new jobs. Without any, wait.

        Returns whether jobs were started.
        """
        was_full = self.room <= 0
        if (reclaimed := await self._reclaim()) is not None:
            return await self._start_reclaimed(reclaimed)
        if self.room <= 0:
            return await self._start_although_full()
        if was_full:  # a slot became free during the search, which had no room for the jobs of other workers
            return False
        claims = self._job_claims
        if not claims.has_read_all() and await self._starts.start_read(claims.read(self.room)):
            return True
        return await self._move_jobs() or await self._start_next(self._time_to_reclaim_s(tuple(Priority)))

    async def _start_next(self, wait_s: float) -> bool:
        """Wait for new jobs. Returns whether jobs were started.

        A worker without a free slot only waits. Otherwise it could claim a job before a worker that has a free slot.
        """
        claims = self._job_claims
        if self._starts.n_free_slots <= 0 or not claims.can_wait_and_read:
            await claims.wait(wait_s)
            return False
        try:
            return await self._starts.start_read(claims.wait_and_read(wait_s, self.room))
        except asyncio.CancelledError:
            await claims.end_wait()
            raise

    def _time_to_reclaim_s(self, priorities: Sequence[Priority]) -> float:
        due_s = min(self._reclaimed_s[priority] for priority in priorities) + SEARCH_EVERY_S
        return max(due_s - self._clock(), SHORTEST_WAIT_S)

    async def _move_jobs(self) -> bool:
        """Claim jobs that wait for a slot in other workers, if this worker has free slots. Returns whether it claimed
        any.
        """
        if self._starts.n_free_slots <= 0 or self._clock() < self._moved_s + SEARCH_EVERY_S:
            return False
        self._moved_s = self._clock()
        found = await self._job_claims.movable(self._starts.n_free_slots)
        for entry in found:
            log.info("job.moved_here id=%s", entry.job_id)
        self._starts.start_soon(found)
        return bool(found)

    async def _reclaim(self) -> Reclaimed | None:
        """Take requeued and expired entries of each priority whose last search is old enough. None: there are none.

        A priority without room is searched as soon as there is room, because such an entry gets the next free slot.
        """
        due = [
            (priority, room)
            for priority, room in self._rooms()
            if self._clock() >= self._reclaimed_s[priority] + SEARCH_EVERY_S
        ]
        if not due:
            return None
        return await self._starts.take(self._search(due), self._suspects.requeue)

    async def _search(self, rooms: Sequence[tuple[Priority, int]]) -> Reclaimed | None:
        """Take the entries of the first priority that has any, up to its room."""
        for priority, room in rooms:
            entries = await self._job_claims.reclaim(room, [priority])
            if len(entries) < room:
                self._reclaimed_s[priority] = self._clock()
            if entries:
                return await self._suspects.select_startable(entries)
        return None

    async def _start_reclaimed(self, reclaimed: Reclaimed) -> bool:
        """Start reclaimed jobs, or run a suspect alone. Returns whether jobs were started beside the running jobs."""
        if reclaimed.entries and not reclaimed.is_suspect:
            self._starts.start_soon(reclaimed.entries)
            return True
        if reclaimed.is_suspect:
            await self._suspects.run_alone(reclaimed.entries[0])
        self._reclaimed_s = dict.fromkeys(Priority, -SEARCH_EVERY_S)  # reclaim the next suspect at once
        return False

    async def _start_although_full(self) -> bool:
        """Start new interactive jobs while bulk jobs fill this worker, or new bulk jobs that the bulk share asks for.

        Without such a job, wait for one, or until a slot becomes free. Returns whether jobs were started.
        """
        self._outbox.room_freed.clear()
        rooms = self._rooms()
        claims = self._job_claims
        for priority, room in rooms:
            if not claims.has_read_all([priority]) and await self._starts.start_read(claims.read(room, [priority])):
                return True
        if rooms:
            await self._wait_for_room_or_job([priority for priority, _ in rooms])
        return False

    def _rooms(self) -> list[tuple[Priority, int]]:
        """Return each priority whose jobs may be claimed now, and how many of them.

        A worker that is full of bulk jobs claims interactive jobs, which do not wait for its bulk jobs. A worker that
        is full of interactive jobs claims the bulk jobs of their share.
        """
        full_rooms = {Priority.INTERACTIVE: self.interactive_room, Priority.BULK: self.bulk_room}
        rooms = full_rooms if self.room <= 0 else dict.fromkeys(Priority, self.room)
        return [(priority, rooms[priority]) for priority in Priority if rooms[priority] > 0]

    async def _wait_for_room_or_job(self, priorities: Sequence[Priority]) -> None:
        """Wait until `Outbox.room_freed` is set, a job of these priorities is new, or the next reclaim is due."""
        room = asyncio.create_task(self._outbox.room_freed.wait())
        job = asyncio.create_task(self._job_claims.wait(self._time_to_reclaim_s(priorities), priorities))
        try:
            await asyncio.wait((room, job), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(room, job)

    async def close(self) -> None:
        """Stop preparing jobs. Call this after `run` has ended and before `Outbox.close`, which requeues these jobs."""
        await self._starts.close()

    def __repr__(self) -> str:
        return f"<Intake room={self.room} starting={self._starts.n_starting}>"
