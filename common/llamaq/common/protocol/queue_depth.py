"""Counts the waiting and running jobs of a queue."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.snapshots import QueueDepth


async def queue_depth(redis: Redis, keys: Keys, queue: str, partitions: int) -> QueueDepth:
    """Return the depth of a queue over all partitions and priorities.

    An entry stays in its stream until its job ends, so the length of a stream counts waiting and running jobs. The
    entries that are pending in the consumer group are running jobs.
    """
    streams = [keys.jobs(queue, partition, priority) for partition in range(partitions) for priority in Priority]
    async with redis.pipeline(transaction=False) as pipe:
        for stream in streams:
            pipe.xlen(stream)
            pipe.xpending(stream, GROUP)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
    total = running = 0
    for length, pending in zip(replies[::2], replies[1::2], strict=True):
        if isinstance(length, Exception):
            raise length
        total += length
        if isinstance(pending, dict):
            running += pending["pending"]
        elif not isinstance(pending, ResponseError):  # no group exists before the first worker creates it
            raise pending
    return QueueDepth(waiting=max(0, total - running), running=running)
