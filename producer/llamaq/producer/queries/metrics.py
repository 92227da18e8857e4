"""Reads the metrics of all queues and workers from Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.job_counters import add_job_counters, sum_partitions
from llamaq.common.metrics.metric_definitions import Samples
from llamaq.common.metrics.worker_samples import add_worker
from llamaq.common.protocol.queue_config import QueueConfig, QueueMode
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.server_state import read_server_memory, server_time_ms
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.producer.queries.damaged_queues import DamagedQueues
from llamaq.producer.queries.dead_letters import count_all
from llamaq.producer.queries.queue_list import find_queues, summarize
from llamaq.producer.queries.queue_snapshots import read_workers
from llamaq.producer.queue_connection import QueueConnection

log = logging.getLogger(__name__)

FIND_QUEUES_EVERY_S = 30.0
"""Seconds between two searches for queues. A search for all of them examines every key in Redis."""
QUEUES_AT_ONCE = 8
"""Number of queues that are read at the same time."""


class MetricsReader:
    """Reads all metrics. The names of the queues are kept for some time, so that not every scrape searches for
    queues.
    """

    def __init__(self, queues: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Create the reader.

        Args:
            queues: The names of the queues to read. Empty: all queues.
            clock: Returns the time in seconds. Must be monotonic.
        """
        self._wanted = frozenset(queues)
        self._clock = clock
        self._partitions: dict[str, int] = {}
        self._found_s = -FIND_QUEUES_EVERY_S
        self._outage_log = OutageLog(log, "metrics")
        self._damaged = DamagedQueues()

    async def read(self, connection: QueueConnection, timeout_s: float) -> Samples:
        """Return all metrics. If Redis does not answer within `timeout_s`, return only `llamaq_redis_up` with the value
        0.
        """
        started_s = self._clock()
        samples = Samples()
        try:
            async with asyncio.timeout(timeout_s):
                await self._read_queues(samples, connection)
                await _read_memory(samples, connection.redis)
        except (RedisError, TimeoutError) as exc:
            late = RedisError(f"no answer within {timeout_s:g} s")
            self._outage_log.record_failure(exc if isinstance(exc, RedisError) else late)
            samples = Samples()
            samples.set(f.REDIS_UP, (), 0)
            return samples
        self._outage_log.record_success()
        samples.set(f.REDIS_UP, (), 1)
        samples.set(f.READ_SECONDS, (), self._clock() - started_s)
        return samples

    async def _read_queues(self, samples: Samples, connection: QueueConnection) -> None:
        if self._clock() - self._found_s >= FIND_QUEUES_EVERY_S:
            self._partitions = await self._find_partitions(connection)
            self._found_s = self._clock()
        now_ms = await server_time_ms(connection.redis)
        places = asyncio.Semaphore(QUEUES_AT_ONCE)

        async def read(queue: str, partitions: int) -> Samples | None:
            async with places:
                return await self._damaged.read(queue, _read_queue(connection, queue, partitions, now_ms))

        for found_samples in await asyncio.gather(*(read(*item) for item in self._partitions.items())):
            if found_samples is not None:
                samples.add(found_samples)

    async def _find_partitions(self, connection: QueueConnection) -> dict[str, int]:
        """Return the number of partitions of each queue. A search is needed if no worker has stored one of them."""
        redis, keys = connection.redis, connection.keys
        reads = {queue: QueueConfig.read(redis, keys, queue, 0) for queue in sorted(self._wanted)}
        configs = {queue: await self._damaged.read(queue, read) for queue, read in reads.items()}
        partitions = {queue: config.partitions for queue, config in configs.items() if config is not None}
        if configs and len(partitions) == len(configs):
            return partitions
        found = await find_queues(connection)
        return {queue: found.get(queue, 1) for queue in sorted(self._wanted or found)}

    def __repr__(self) -> str:
        return f"<MetricsReader {len(self._partitions)} queues>"


async def _read_memory(samples: Samples, redis: Redis) -> None:
    for memory in await read_server_memory(redis):
        samples.set(f.REDIS_USED_MEMORY, (memory.node,), memory.used_bytes)
        samples.set(f.REDIS_MAXMEMORY, (memory.node,), memory.max_bytes)


async def _read_queue(connection: QueueConnection, queue: str, partitions: int, now_ms: int) -> Samples:
    samples = Samples()
    add_job_counters(samples, queue, await read_job_counters(connection, queue, partitions))
    summary = await summarize(connection, queue, partitions)
    samples.set(f.WAITING_JOBS, (queue,), summary.waiting)
    samples.set(f.RUNNING_JOBS, (queue,), summary.running)
    samples.set(f.DELAYED_JOBS, (queue,), summary.delayed)
    samples.set(f.OLDEST_WAITING, (queue,), summary.oldest_waiting_s or 0)
    samples.set(f.DEAD_LETTERS, (queue,), await count_all(connection, queue, partitions))
    samples.set(f.WORKERS, (queue,), summary.workers)
    for mode in QueueMode:
        samples.set(f.QUEUE_MODE, (queue, mode.value), summary.mode is mode)
    for worker in await read_workers(connection, queue):
        add_worker(samples, worker, now_ms)
    return samples


async def read_job_counters(connection: QueueConnection, queue: str, partitions: int) -> dict[str, int]:
    """Return the counters of the jobs of a queue, with the names of `_metrics.lua`."""
    hashes = [await _read_counters(connection, queue, partition) for partition in range(partitions)]
    return sum_partitions(hashes)


async def _read_counters(connection: QueueConnection, queue: str, partition: int) -> dict[bytes, bytes]:
    try:
        counters: Any = await connection.redis.hgetall(connection.keys.metrics(queue, partition))
        return dict(counters)
    except ResponseError as exc:
        if not is_job_key_error(exc):
            raise
        return {}  # another client has overwritten the key; the next end of a job begins it again
