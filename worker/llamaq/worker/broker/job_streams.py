"""The job streams of a queue as one worker reads them: new entries, those of silent workers, and its own at the end.

On one server a single command waits for all streams. A cluster reads each partition where it lies, and nothing waits
in all places at once but a look: a read that claims, left behind in one place while there was work in another, would
claim what the worker has no room for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.scripts import HANDED_BACK, NEVER_RENEWED_MS
from llamaq.common.redis.connect import is_cluster

log = logging.getLogger(__name__)

StreamEntries = list[tuple[bytes, dict[bytes, bytes]]]
"""Id and fields of each entry."""
Entries = list[tuple[str, StreamEntries]]
"""For each stream its entries."""
Reply = tuple[str, StreamEntries | RedisError]
Read = Callable[[Sequence[str], int], Awaitable[list[Reply]]]
"""From streams, and how many entries each may give, to what each gave."""

MAX_CLAIMED = 1000
"""More than a worker ever has claimed."""
MAX_LOOK = 1000
"""Entries that one look for news passes over."""
AWAY_S = 3.0
"""A partition of a cluster that did not answer is left alone for so long, so that the others need not wait for it."""


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
        self._away_until_s: dict[int, float] = {}
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
            streams = [self._partitions[place][priority] for place in self._in_turn()]
            found += await self._in_shares(streams, count - _size(found), self._read_new)
        return found

    async def _in_shares(self, streams: list[str], count: int, read: Read) -> Entries:
        """Up to `count` entries, evenly from all streams as long as they have some.

        Part of a cluster may be away: raises only when nothing that was asked has answered.
        """
        found: Entries = []
        errors: list[RedisError] = []
        n_answers = 0
        while streams and count:
            some, streams = streams[:count], streams[count:]
            share = count // len(some)
            for stream, entries in await read(some, share):
                if isinstance(entries, RedisError):
                    errors.append(entries)
                    continue
                n_answers += 1
                if entries:
                    found.append((stream, entries))
                count -= len(entries)
                if len(entries) == share:  # there may be more
                    streams.append(stream)
        if errors and not n_answers:
            raise errors[0]
        return found

    async def _read_new(self, streams: Sequence[str], share: int) -> list[Reply]:
        if not self._is_scattered:
            new = dict(await self._read_group(streams, share, None))
            return [(stream, new.get(stream, [])) for stream in streams]

        async def read_one(stream: str) -> StreamEntries:
            return dict(await self._read_group([stream], share, None)).get(stream, [])

        return await self._replies(streams, read_one)

    async def _replies(self, streams: Sequence[str], read: Callable[[str], Awaitable[StreamEntries]]) -> list[Reply]:
        """What each of the streams gives; raises what is no error of Redis."""
        replies: list[Reply] = []
        for stream, reply in zip(
            streams, await asyncio.gather(*map(read, streams), return_exceptions=True), strict=True
        ):
            if isinstance(reply, RedisError):
                self._leave_alone(stream)
            elif isinstance(reply, BaseException):
                raise reply
            replies.append((stream, reply))
        return replies

    def _leave_alone(self, stream: str) -> None:
        place = next(place for place, streams in enumerate(self._partitions) if stream in streams.values())
        self._away_until_s[place] = asyncio.get_running_loop().time() + AWAY_S

    def _in_turn(self) -> list[int]:
        """The partitions, beginning with the next one; without those that are away, unless all are."""
        self._turn = (self._turn + 1) % len(self._partitions)
        places = [*range(self._turn, len(self._partitions)), *range(self._turn)]
        if not self._is_scattered:
            return places
        now = asyncio.get_running_loop().time()
        return [place for place in places if self._away_until_s.get(place, 0.0) <= now] or places

    async def wait(self, wait_s: float) -> Entries:
        """Wait for the next new entry and take it, or on a cluster only return when there may be one."""
        if self._is_scattered:
            await self._look(wait_s)
            return []
        streams = [stream for place in self._in_turn() for stream in self._partitions[place].values()]
        return await self._read_group(streams, 1, int(wait_s * 1000))

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
        for place in self._in_turn():
            if place not in self._looks:
                streams = list(self._partitions[place].values())
                self._looks[place] = asyncio.create_task(self._look_at(streams, wait_s))
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
            self._leave_alone(streams[0])
            return False
        for stream, entries in reply or ():
            self._looked_to[stream.decode()] = entries[-1][0]
        return bool(reply)

    async def reclaim(self, count: int, idle_ms: int) -> Entries:
        """Up to `count` entries whose worker has been silent for so long, or has handed them back."""

        async def reclaim_some(streams: Sequence[str], share: int) -> list[Reply]:
            return await self._replies(streams, lambda stream: self._reclaim_from(stream, share, idle_ms))

        streams = [stream for place in self._in_turn() for stream in self._partitions[place].values()]
        return await self._in_shares(streams, count, reclaim_some)

    async def _reclaim_from(self, stream: str, count: int, idle_ms: int) -> StreamEntries:
        """In two steps: XAUTOCLAIM looks at ten times `count` entries only, and all of those may be well."""
        try:
            idle: Any = await self._redis.xpending_range(stream, GROUP, min="-", max="+", count=count, idle=idle_ms)
        except ResponseError as exc:
            if "NOGROUP" not in str(exc):
                raise
            await self._create_group(stream)
            return []
        ids = [one["message_id"] for one in idle]
        claimed: Any = await self._redis.xclaim(stream, GROUP, self._consumer, idle_ms, ids) if ids else []
        # Redis 6.2 answers (None, None) for an entry that was deleted without being acknowledged.
        return [(entry, fields) for entry, fields in claimed if entry is not None]

    async def close(self) -> None:
        """Give up what was claimed and never started, and take this consumer out of the groups."""
        await cancel_tasks(*self._looks.values())
        self._looks.clear()
        errors: list[RedisError] = []
        for partition in self._partitions:
            for stream in partition.values():
                try:
                    await self._leave_group(stream)
                except RedisError as exc:  # of a part of a cluster, perhaps
                    errors.append(exc)
        if errors:
            raise errors[0]

    async def _leave_group(self, stream: str) -> None:
        pending: Any = await self._redis.xpending_range(
            stream, GROUP, min="-", max="+", count=MAX_CLAIMED, consumername=self._consumer
        )
        entries = [item["message_id"] for item in pending]
        if entries:
            await self._redis.xclaim(stream, GROUP, HANDED_BACK, 0, entries, idle=NEVER_RENEWED_MS, justid=True)
        if len(entries) < MAX_CLAIMED:  # deleting a consumer deletes what is pending with it
            await self._redis.xgroup_delconsumer(stream, GROUP, self._consumer)


def _size(found: Entries) -> int:
    return sum(len(entries) for _, entries in found)
