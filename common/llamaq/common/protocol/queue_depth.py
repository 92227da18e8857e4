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
    leases have not expired. All other jobs wait, also those of dead workers.

    Raises:
        RedisError: A partition did not answer.
    """
    depth = redis.register_script(source("depth"))

    async def count(partition: int) -> tuple[int, int]:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        waiting, running = await depth(keys=streams, args=[GROUP])
        return int(waiting), int(running)

    counts: Any = await asyncio.gather(*map(count, range(partitions)))
    return QueueDepth(waiting=sum(one[0] for one in counts), running=sum(one[1] for one in counts))
