"""Counts the waiting and running jobs of a queue."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_calls import source
from llamaq.common.protocol.snapshots import QueueDepth


async def queue_depth(redis: Redis, keys: Keys, queue: str, partitions: int) -> QueueDepth:
    """Return the depth of a queue over all partitions and priorities.

    Only jobs that have a slot in a live worker run: their entries belong to the consumer of that worker, and their
    leases have not expired. Jobs that were submitted for a later time are delayed until then. All other jobs wait, also
    those of dead workers.

    Raises:
        RedisError: A partition did not answer.
    """
    depth = redis.register_script(source("depth"))

    async def count(partition: int) -> list[int]:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        counted: Any = await depth(keys=[keys.later(queue, partition), *streams], args=[GROUP])
        return [int(number) for number in counted]

    waiting, running, delayed = map(sum, zip(*await asyncio.gather(*map(count, range(partitions))), strict=True))
    return QueueDepth(waiting=waiting, running=running, delayed=delayed)
