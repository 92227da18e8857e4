"""Finds how long the oldest waiting job of a queue has waited."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_source import source


async def oldest_waiting_s(redis: Redis, keys: Keys, queue: str, partitions: int) -> float | None:
    """Return for how many seconds the oldest waiting job has waited since its submit, or since it was due.

    Returns:
        The seconds. None: no job waits.

    Raises:
        RedisError: A partition did not answer.
    """
    oldest = redis.register_script(source("oldest"))

    async def search(partition: int) -> int:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        reply: Any = await oldest(keys=[keys.later(queue, partition), *streams], args=[GROUP])
        return int(reply)

    longest_ms = max(await asyncio.gather(*map(search, range(partitions))))
    return None if longest_ms < 0 else longest_ms / 1000
