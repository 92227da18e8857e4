"""Counts the waiting and running jobs of a queue."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.script_calls import source
from llamaq.common.protocol.snapshots import QueueDepth


async def queue_depth(redis: Redis, keys: Keys, queue: str, partitions: int) -> QueueDepth:
    """Return the depth of a queue over all partitions and priorities.

    Only jobs that have a slot in a live worker run: their entries belong to the consumer of that worker, and their
    leases have not expired. Jobs that were submitted for a later time are delayed until then. All other jobs wait, also
    those of dead workers. If partitions have different modes, because one did not answer a change, the depth has the
    mode that lets the fewest jobs through.

    Raises:
        RedisError: A partition did not answer.
    """
    depth = redis.register_script(source("depth"))

    async def count(partition: int) -> tuple[int, int, int, QueueMode]:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        reply: Any = await depth(keys=[keys.later(queue, partition), *streams], args=[GROUP])
        waiting, running, delayed, mode = reply
        return int(waiting), int(running), int(delayed), QueueMode(mode.decode())

    counts = await asyncio.gather(*map(count, range(partitions)))
    waiting, running, delayed = (sum(numbers) for numbers in zip(*(one[:3] for one in counts), strict=True))
    modes = {one[3] for one in counts}
    mode = next(mode for mode in (QueueMode.PAUSED, QueueMode.DRAINING, QueueMode.OPEN) if mode in modes)
    return QueueDepth(waiting=waiting, running=running, delayed=delayed, mode=mode)
