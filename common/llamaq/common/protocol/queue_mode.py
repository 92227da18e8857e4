"""Pauses, drains and resumes a queue."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_config import QueueConfig, QueueMode
from llamaq.common.protocol.script_source import source

MAX_WAITING_EXAMINED_BY_PAUSE = 10_000
"""Largest number of entries of one stream that are examined to find jobs that wait for a first slot in a worker."""


async def set_queue_mode(redis: Redis, keys: Keys, queue: str, partitions: int, mode: QueueMode) -> None:
    """Set the mode of all partitions of a queue. The call may be repeated.

    Args:
        redis: The Redis client.
        keys: The names of the keys.
        queue: The name of the queue.
        partitions: The number of partitions, unless a worker has stored it.
        mode: The mode.

    Raises:
        RedisError: A partition did not answer. The mode is set in the other partitions.
    """
    stored = await QueueConfig.read(redis, keys, queue, 0)
    set_mode = redis.register_script(source("set_mode"))

    async def set_in(partition: int) -> None:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        value = "" if mode is QueueMode.OPEN else mode.value
        await set_mode(
            keys=[keys.config(queue, partition), *streams], args=[value, GROUP, MAX_WAITING_EXAMINED_BY_PAUSE]
        )

    n_partitions = partitions if stored is None else stored.partitions
    results = await asyncio.gather(*map(set_in, range(n_partitions)), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
