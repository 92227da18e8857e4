"""How many jobs of a queue wait, and how many are with a worker."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_state import QueueDepth


async def queue_depth(redis: Redis, keys: Keys, queue: str, partitions: int) -> QueueDepth:
    """The depth over all partitions and priorities.

    An entry stays in its stream until its job ends, so the length counts both; those pending with the group run.
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
        elif not isinstance(pending, ResponseError):  # without a group no worker has come yet, and none runs
            raise pending
    return QueueDepth(waiting=max(0, total - running), running=running)
