"""The job streams of a queue as one worker reads them: new entries, those of silent workers, and its own at the end.

On one server a single command waits for all streams. A cluster reads each partition where it lies, and nothing waits
in all places at once but a look: a read that claims, left behind in one place while there was work in another, would
claim what the worker has no room for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from llamaq.common.connection import is_cluster
from llamaq.common.keys import GROUP, Keys
from llamaq.common.messages import Priority
from llamaq.common.scripts import HANDED_BACK, NEVER_RENEWED_MS
from llamaq.common.tasks import end_tasks

log = logging.getLogger(__name__)

Entries = list[tuple[str, list[tuple[bytes, dict[bytes, bytes]]]]]
"""For each stream its entries: id and fields."""

MAX_CLAIMED = 1000
"""More than a worker ever has claimed."""
MAX_LOOK = 1000
"""Entries that one look for news passes over."""


class JobStreams:
    """Reads fairly: each call begins with another partition, and no partition gives more than its share."""

    def __init__(self, redis: Redis, keys: Keys, *, queue: str, partitions: int, consumer: str) -> None:
        self._redis = redis
        self._consumer = consumer
        self._partitions = [
            {priority: keys.jobs(queue, partition, priority) for priority in Priority}
            for partition in range(partitions)
        ]
        self._is_scattered = partitions > 1 and is_cluster(redis)
        self._turn = 0
        self._looked_to: dict[str, bytes] = {}
        """For each stream the last entry that a look has passed."""
        self._looks: dict[int, asyncio.Task[bool]] = {}

    def __repr__(self) -> str:
        return f"<JobStreams partitions={len(self._partitions)} looks={len(self._looks)}>"

    async def open(self) -> None:
        """Make the consumer groups."""
        for streams in self._partitions:
            for stream in streams.values():
                await self._create_group(stream)
                if self._is_scattered:
                    last: Any = await self._redis.xrevrange(stream, count=1)
                    self._looked_to[stream] = last[0][0] if last else b"0-0"

    async def _create_group(self, stream: str) -> None:
        self._looked_to.pop(stream, None)
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise

    async def read(self, count: int, priorities: Sequence[Priority] = tuple(Priority)) -> Entries:
        """Up to `count` new entries, interactive ones first; does not wait for any."""
        found: Entries = []
        for priority in priorities:
            streams = [partition[priority] for partition in self._in_turn()]
            while streams and count:
                some, streams = streams[:count], streams[count:]
                share = count // len(some)
                new = await self._read_some(some, share)
                count -= sum(len(entries) for _, entries in new)
                streams += [stream for stream, entries in new if len(entries) == share]  # there may be more
                found += new
        return found

    async def wait(self, wait_s: float) -> Entries:
        """Wait for the next new entry and take it, or on a cluster only return when there may be one."""
        if self._is_scattered:
            await self._look(wait_s)
            return []
        streams = [stream for partition in self._in_turn() for stream in partition.values()]
        return await self._read_group(streams, 1, int(wait_s * 1000))

    def _in_turn(self) -> list[dict[Priority, str]]:
        self._turn = (self._turn + 1) % len(self._partitions)
        return self._partitions[self._turn :] + self._partitions[: self._turn]

    async def _read_some(self, streams: Sequence[str], count: int) -> Entries:
        """Up to `count` of each. Part of a cluster may be away: what the others gave is not lost with it."""
        if not self._is_scattered:
            return await self._read_group(streams, count, None)
        replies = await asyncio.gather(
            *(self._read_group([stream], count, None) for stream in streams), return_exceptions=True
        )
        found: Entries = []
        errors = []
        for reply in replies:
            if isinstance(reply, BaseException):
                errors.append(reply)
            else:
                found += reply
        if errors and not found:
            raise errors[0]
        return found

    async def _read_group(self, streams: Sequence[str], count: int, block_ms: int | None) -> Entries:
        wanted: dict[Any, Any] = dict.fromkeys(streams, ">")
        try:
            reply: Any = await self._redis.xreadgroup(GROUP, self._consumer, wanted, count=count, block=block_ms)
        except ResponseError as exc:
            if "NOGROUP" not in str(exc):
                raise
            # Somebody flushed Redis under us: begin again from nothing.
            for stream in streams:
                await self._create_group(stream)
            return []
        return [(stream.decode(), entries) for stream, entries in reply or ()]

    async def _look(self, wait_s: float) -> None:
        """Wait until something was added anywhere, whoever takes it; at most `wait_s`."""
        for place, streams in enumerate(self._partitions):
            if place not in self._looks:
                self._looks[place] = asyncio.create_task(self._look_at(list(streams.values()), wait_s))
        done, _ = await asyncio.wait(self._looks.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for place, look in list(self._looks.items()):
            if look in done:
                del self._looks[place]
                look.result()

    async def _look_at(self, streams: list[str], wait_s: float) -> bool:
        after: dict[Any, Any] = {stream: self._looked_to.get(stream, b"0-0") for stream in streams}
        try:
            reply: Any = await self._redis.xread(after, count=MAX_LOOK, block=int(wait_s * 1000))
        except RedisError as exc:  # the next read raises it, if it is still so
            log.debug("streams.look_failed streams=%s error=%r", streams, exc)
            return False
        for stream, entries in reply or ():
            self._looked_to[stream.decode()] = entries[-1][0]
        return bool(reply)

    async def reclaim(self, count: int, idle_ms: int) -> Entries:
        """Up to `count` entries whose worker has been silent for so long, or has handed them back."""
        found: Entries = []
        for partition in self._in_turn():
            for stream in partition.values():
                if count <= 0:
                    return found
                try:
                    entries = await self._reclaim_from(stream, count, idle_ms)
                except RedisError:
                    if not found:
                        raise
                    return found  # the next call begins elsewhere
                count -= len(entries)
                found.append((stream, entries))
        return found

    async def _reclaim_from(self, stream: str, count: int, idle_ms: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        try:
            reply: Any = await self._redis.xautoclaim(stream, GROUP, self._consumer, idle_ms, count=count)
        except ResponseError as exc:
            if "NOGROUP" not in str(exc):
                raise
            await self._create_group(stream)
            return []
        # Redis 6.2 answers (None, None) for an entry that was deleted without being acknowledged.
        return [(entry, fields) for entry, fields in reply[1] if entry is not None]

    async def close(self) -> None:
        """Give up what was claimed and never started, and take this consumer out of the groups."""
        await end_tasks(*self._looks.values())
        self._looks.clear()
        for partition in self._partitions:
            for stream in partition.values():
                await self._leave_group(stream)

    async def _leave_group(self, stream: str) -> None:
        pending: Any = await self._redis.xpending_range(
            stream, GROUP, min="-", max="+", count=MAX_CLAIMED, consumername=self._consumer
        )
        entries = [item["message_id"] for item in pending]
        if entries:
            await self._redis.xclaim(stream, GROUP, HANDED_BACK, 0, entries, idle=NEVER_RENEWED_MS, justid=True)
        if len(entries) < MAX_CLAIMED:  # deleting a consumer deletes what is pending with it
            await self._redis.xgroup_delconsumer(stream, GROUP, self._consumer)
