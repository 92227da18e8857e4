"""Counts the waiting and running jobs of a queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_and_worker_state import QueueDepth, TenantDepth
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.script_source import source


async def queue_depth(redis: Redis, keys: Keys, queue: str, partitions: int, *, max_tenants: int = 0) -> QueueDepth:
    """Return the depth of a queue over all partitions and priorities.

    A job counts as running if it has a slot in a live worker: its entry belongs to the consumer of this worker, and its
    lease has not expired. A job that was submitted for a later time counts as delayed until this time. All other jobs
    count as waiting, also jobs of dead workers. If a partition did not answer a change of the mode, partitions have
    different modes. Then the depth has the most restrictive mode.

    Args:
        redis: The Redis client.
        keys: The names of the keys.
        queue: The name of the queue.
        partitions: The number of partitions.
        max_tenants: Number of tenants to count in each job stream at most.

    Raises:
        RedisError: A partition did not answer.
    """
    depth = redis.register_script(source("depth"))

    async def count(partition: int) -> tuple[int, int, int, QueueMode, list[Any]]:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        reply: Any = await depth(keys=[keys.later(queue, partition), *streams], args=[GROUP, max_tenants])
        waiting, running, delayed, mode, tenants = reply
        return int(waiting), int(running), int(delayed), QueueMode(mode.decode()), tenants

    counts = await asyncio.gather(*map(count, range(partitions)))
    waiting, running, delayed = (sum(numbers) for numbers in zip(*(one[:3] for one in counts), strict=True))
    modes = {one[3] for one in counts}
    mode = next(mode for mode in (QueueMode.PAUSED, QueueMode.DRAINING, QueueMode.OPEN) if mode in modes)
    tenants = _add_up([counts_of_tenant for one in counts for counts_of_tenant in one[4]])
    return QueueDepth(waiting=waiting, running=running, delayed=delayed, mode=mode, tenants=tenants)


def _add_up(counts: Sequence[tuple[bytes, int, int]]) -> tuple[TenantDepth, ...]:
    """Return the sums over all job streams, sorted by tenant. Each item has a tenant, its waiting and claimed jobs."""
    waiting: Counter[str] = Counter()
    claimed: Counter[str] = Counter()
    for name, n_waiting, n_claimed in counts:
        tenant = name.decode(errors="replace")  # another client may have written a name that is not text
        waiting[tenant] += int(n_waiting)
        claimed[tenant] += int(n_claimed)
    return tuple(TenantDepth(tenant=name, waiting=waiting[name], claimed=claimed[name]) for name in sorted(waiting))
