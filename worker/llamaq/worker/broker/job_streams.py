"""The job streams of one queue: reads and reclaims their entries.

A worker waits for new entries with a blocking XREAD ("peek"), which takes no entry, and then reads them. A blocking
XREADGROUP on several streams could take more entries than the worker has room for. On one server, one XREAD waits for
the entries of all partitions. On a cluster, partitions may be on different nodes, and each has its own XREAD.

If the queue has one partition, the read is sent together with the XREAD. Redis executes it as soon as there is an
entry, which saves the time of one call.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL, Claimant, DueJobs, Reader, StreamEntries
from llamaq.common.redis.connect import is_cluster
from llamaq.worker.broker.lease_guard import LeaseGuard
from llamaq.worker.broker.open_jobs import OpenJobs
from llamaq.worker.broker.partition_turns import PartitionTurns
from llamaq.worker.broker.stream_scripts import StreamScripts
from llamaq.worker.broker.worker_queue import WorkerQueue

log = logging.getLogger(__name__)

T = TypeVar("T")

Entries = list[tuple[str, StreamEntries]]
"""The entries of each stream."""
Reply = tuple[str, StreamEntries | RedisError]
"""A stream with its entries, or with the error of its partition."""
Read = Callable[[Sequence[str], int], Awaitable[list[Reply]]]
"""Reads at most the given number of entries from each of the streams."""

MAX_PEEKED = 1000
"""Upper bound on the entries that one peek returns for each stream."""
READ_TIMEOUT_S = 1.0
"""How long a read waits for one partition of a cluster. Then this partition is skipped until it answers again."""
END_WAIT_S = 0.5
"""How long `end_wait` waits for Redis."""
WAKE_TTL_S = 10
"""The stream that ends a wait is deleted after this time in seconds, longer than any wait."""


class JobStreams:
    """Reads the job streams of all partitions in a fair order.

    Each call starts with the next partition in turn, and reads an equal share from each partition that has entries.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self, queue: WorkerQueue, claimant: Claimant) -> None:
        """Create the object. `open` must be called before any other method.

        Args:
            queue: The queue to read.
            claimant: The worker that reads and claims. Its lease is the lease of the entries.
        """
        self._queue = queue
        self._redis = queue.redis
        self._scripts = StreamScripts(queue.redis, queue.keys)
        self._partitions = [
            {priority: queue.job_stream(partition, priority) for priority in Priority} for partition in queue.partitions
        ]
        all_streams = [stream for streams in self._partitions for stream in streams.values()]
        self._reader = Reader(claimant, secrets.token_hex(8), dict.fromkeys(all_streams, 0))
        self._wake = queue.keys.wake(queue.name, 0, self._reader.token)
        """Key of a stream whose first entry ends the call of `wait_and_read`."""
        self._guards = [LeaseGuard(claimant.lease_ms / 1000) for _ in queue.partitions]
        self.open_jobs = OpenJobs(queue.n_partitions)
        """Which partitions may have jobs."""
        self._is_scattered = queue.n_partitions > 1 and is_cluster(queue.redis)
        self.can_wait_and_read = queue.n_partitions == 1
        """Whether `wait_and_read` may be called."""
        self._read_out: set[str] = set()
        """With one partition: the streams of which the last read took all new entries. Newer ones end the next wait."""
        self._turns = PartitionTurns(queue.redis, queue.n_partitions)
        self._last_peeked: dict[str, bytes] = {}
        """Maps each stream to the id of the newest entry that has ended a wait."""
        self._peeks: dict[tuple[int, tuple[Priority, ...]], asyncio.Task[Any]] = {}
        """Maps a partition and its peeked priorities to the running peek, or to a peek that has ended after its
        wait. On one server, the peek of partition 0 is for all partitions."""

    def has_read_all(self, priorities: Sequence[Priority] = tuple(Priority)) -> bool:
        """Return whether the last read took all new entries of these priorities. Newer entries end the next wait.

        With several partitions, this is not known.
        """
        return self._read_out.issuperset(self._partitions[0][priority] for priority in priorities)

    def __repr__(self) -> str:
        return f"<JobStreams of {self._queue!r} peeks={len(self._peeks)}>"

    async def open(self) -> None:
        """Create the consumer groups. On a cluster, a partition that does not answer is opened later.

        Raises:
            RedisError: No partition answered.
        """
        replies = await self._read_each([streams[Priority.BULK] for streams in self._partitions], self._open_partition)
        errors = [reply for _, reply in replies if isinstance(reply, RedisError)]
        if errors and (len(errors) == len(replies) or not self._is_scattered):
            raise errors[0]

    async def _open_partition(self, bulk_stream: str) -> StreamEntries:
        for stream in self._partitions[self._queue.partition_of(bulk_stream)].values():
            await self._create_group(stream)
            last: Any = await self._redis.xrevrange(stream, count=1)
            self._last_peeked[stream] = last[0][0] if last else b"0-0"
        return []

    async def _create_group(self, stream: str) -> None:
        self._last_peeked.pop(stream, None)
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as exc:
            if "WRONGTYPE" in str(exc):
                problem = f"WRONGTYPE: {stream} is not a stream, so no program of llamaq wrote it: rename or delete it"
                raise ResponseError(problem) from exc
            if "BUSYGROUP" not in str(exc):
                raise

    async def read(self, count: int, priorities: Sequence[Priority] = tuple(Priority)) -> Entries:
        """Read up to `count` new entries and claim their jobs, interactive jobs first, without a wait."""
        if len(self._partitions) == 1:  # one call for both priorities
            return await self._read_partition(count, priorities)
        found: Entries = []
        for priority in priorities:
            streams = [self._partitions[partition][priority] for partition in self._turns.next_order()]
            try:
                found += await self._read_fairly(streams, count - _size(found), self._read_new)
            except RedisError:
                if not found:
                    raise
                break  # the next call returns the error: the caller must get the jobs that are claimed now
        return found

    async def _read_partition(self, count: int, priorities: Sequence[Priority]) -> Entries:
        """Read the only partition."""
        streams = [self._partitions[0][priority] for priority in priorities]
        found = await self._read_group(streams, count, count)
        self._note_read(streams, found, count)
        return found

    def _note_read(self, streams: Sequence[str], found: Entries, count: int) -> None:
        """Note which streams of the only partition are read out after a read of up to `count` entries."""
        if _size(found) < min(count, MAX_JOBS_IN_CALL):
            self._read_out.update(streams)
        else:
            self._read_out.difference_update(stream for stream, _ in found)

    async def _read_fairly(self, streams: list[str], count: int, read: Read) -> Entries:
        """Read up to `count` entries, an equal share from each stream that has entries.

        Raises:
            RedisError: No stream answered. On a cluster, errors of some partitions are ignored.
        """
        found: Entries = []
        errors: list[RedisError] = []
        n_replies = 0
        while streams and count:
            n_wanted = min(count, MAX_JOBS_IN_CALL)
            batch, streams = streams[:n_wanted], streams[n_wanted:]
            share = n_wanted // len(batch)
            try:
                replies = await read(batch, share)
            except RedisError:
                if not found:
                    raise
                break
            for stream, entries in replies:
                if isinstance(entries, RedisError):
                    errors.append(entries)
                    continue
                n_replies += 1
                if entries:
                    found.append((stream, entries))
                count -= len(entries)
                if len(entries) == share:  # the stream may have more entries
                    streams.append(stream)
        if errors and not n_replies:
            raise errors[0]
        return found

    async def _read_new(self, streams: Sequence[str], share: int) -> list[Reply]:
        if not self._is_scattered:
            new = dict(await self._read_group(streams, share, share * len(streams)))
            return [(stream, new.get(stream, [])) for stream in streams]

        async def read_one(stream: str) -> StreamEntries:
            return dict(await self._read_group([stream], share, share)).get(stream, [])

        return await self._read_each(streams, read_one)

    async def _read_each(self, streams: Sequence[str], read: Callable[[str], Awaitable[StreamEntries]]) -> list[Reply]:
        """Read each stream with a separate command. A `RedisError` is returned as the reply of its stream."""
        replies: list[Reply] = []
        results = await asyncio.gather(*(self._bounded(read, stream) for stream in streams), return_exceptions=True)
        for stream, reply in zip(streams, results, strict=True):
            if isinstance(reply, RedisError):
                self._skip_partition_of(stream)
            elif isinstance(reply, BaseException):
                raise reply
            replies.append((stream, reply))
        return replies

    async def _bounded(self, read: Callable[[str], Awaitable[StreamEntries]], stream: str) -> StreamEntries:
        """Read a stream. On a cluster, a partition that does not answer must not delay the others for long."""
        if not self._is_scattered:
            return await read(stream)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await read(stream)
        except TimeoutError as exc:
            raise RedisTimeoutError(f"the partition did not answer within {READ_TIMEOUT_S:g} s") from exc

    def _skip_partition_of(self, stream: str) -> None:
        """On a cluster, do not read the partition of this stream until it answers again."""
        if self._is_scattered:
            self._turns.leave_out(self._queue.partition_of(stream), stream)

    async def _read_group(self, streams: Sequence[str], count: int, total: int) -> Entries:
        return await self._received(streams, self._scripts.read(self._reader, streams, count, total))

    async def _received(self, streams: Sequence[str], read: Awaitable[Entries]) -> Entries:
        """Return the entries of a read of these streams."""
        found = await self._with_groups(streams, read)
        for stream, _ in found:
            self._reader.n_replies[stream] += 1
        return found

    async def _with_groups(self, streams: Sequence[str], read: Awaitable[list[T]]) -> list[T]:
        """Return the result of a read. If the streams were deleted, for example by FLUSHALL, create them again."""
        try:
            return await read
        except ResponseError as exc:
            if "NOGROUP" not in str(exc):
                raise
            for stream in streams:
                await self._create_group(stream)
            return []

    async def wait_and_read(self, wait_s: float, count: int) -> Entries:
        """Wait up to `wait_s` for a new entry of the only partition, then read up to `count` entries like `read`.

        The call is one round trip. It must not be cancelled, because Redis may read after that: `end_wait` ends it.
        """
        streams = [self._partitions[0][priority] for priority in Priority]
        after = [self._last_peeked.get(stream, b"0-0") for stream in streams]
        words = ("XREAD", "COUNT", MAX_PEEKED, "BLOCK", int(wait_s * 1000), "STREAMS", *streams, self._wake)
        self._read_out.clear()
        found = await self._received(streams, self._read_behind((*words, *after, b"0-0"), streams, count))
        self._note_read(streams, found, count)
        return found

    async def _read_behind(self, wait: tuple[Any, ...], streams: Sequence[str], count: int) -> Entries:
        peeked, found = await self._scripts.wait_and_read((wait, {}), self._reader, streams, count)
        if isinstance(peeked, RedisError):
            log.debug("streams.peek_failed streams=%s error=%s", streams, peeked)
        else:
            self._note_peeked(peeked)
        return found

    async def end_wait(self) -> None:
        """End a running call of `wait_and_read`, also one that Redis has not received yet. No other call may follow."""
        try:
            async with asyncio.timeout(END_WAIT_S), self._redis.pipeline(transaction=True) as pipe:
                pipe.xadd(self._wake, {"by": "close"})
                pipe.expire(self._wake, WAKE_TTL_S)
                await pipe.execute()
        except (RedisError, TimeoutError) as exc:  # the wait then ends after its own time limit
            log.debug("streams.wait_not_ended error=%s", exc)

    async def wait(self, wait_s: float, priorities: Sequence[Priority] = tuple(Priority)) -> None:
        """Wait up to `wait_s` for a new entry of these priorities in any partition.

        The call may return early without a new entry. It takes no entry. The next call with the same priorities also
        awaits unfinished peeks. After a call that is not cancelled, it is not known whether there are entries.
        """
        peeked = tuple(priorities)
        for partition in self._turns.next_order() if self._is_scattered else [0]:
            if (partition, peeked) not in self._peeks:
                partitions = [self._partitions[partition]] if self._is_scattered else self._partitions
                streams = [one[priority] for one in partitions for priority in peeked]
                self._peeks[partition, peeked] = asyncio.create_task(self._peek_at(streams, wait_s))
        running = {key: peek for key, peek in self._peeks.items() if key[1] == peeked}
        done, _ = await asyncio.wait(running.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for key, peek in running.items():
            if peek in done:
                del self._peeks[key]
                # A peek that ends after its call is noted here by a later call. So its entries end the next wait.
                self._note_peeked(peek.result())
        self._read_out.clear()

    async def _peek_at(self, streams: list[str], wait_s: float) -> Any:
        after: dict[Any, Any] = {stream: self._last_peeked.get(stream, b"0-0") for stream in streams}
        try:
            reply: Any = await self._redis.xread(after, count=MAX_PEEKED, block=int(wait_s * 1000))
        except RedisError as exc:  # if the error persists, the next read raises it
            log.debug("streams.peek_failed streams=%s error=%s", streams, exc)
            self._skip_partition_of(streams[0])
            return []
        return reply

    def _note_peeked(self, reply: Any) -> None:
        for stream, entries in reply or ():
            self._last_peeked[stream.decode()] = entries[-1][0]
        if reply:
            self.open_jobs.forget()

    def observe(self, partition: int, due: DueJobs, waited_s: float) -> None:
        """Record a reply of a partition's server, and how long this worker has waited for it: for `reclaim`."""
        self._guards[partition].observe(due.now_ms, waited_s)
        self.open_jobs.note(partition, due.n_open)

    async def reclaim(self, count: int, priorities: Sequence[Priority] = tuple(Priority)) -> Entries:
        """Take up to `count` entries that were requeued or whose lease has expired, interactive jobs first."""
        if not self.open_jobs.may_exist():
            return []

        async def reclaim_from(stream: str, share: int) -> StreamEntries:
            lease_ms = self._reader.claimant.lease_ms
            trusted_until_ms = self._guards[self._queue.partition_of(stream)].trusted_until_ms()
            reading = self._scripts.reclaim(stream, share, lease_ms, trusted_until_ms=trusted_until_ms)
            return await self._with_groups([stream], reading)

        async def reclaim_some(streams: Sequence[str], share: int) -> list[Reply]:
            return await self._read_each(streams, lambda stream: reclaim_from(stream, share))

        found: Entries = []
        for priority in priorities:
            streams = [self._partitions[partition][priority] for partition in self._turns.next_order()]
            found += await self._read_fairly(streams, count - _size(found), reclaim_some)
        return found

    async def close(self) -> None:
        """End the waits for new entries."""
        await cancel_tasks(*self._peeks.values())
        self._peeks.clear()
        await self._turns.close()


def _size(found: Entries) -> int:
    return sum(len(entries) for _, entries in found)
