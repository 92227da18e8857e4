"""Decides in which order the partitions of a queue are read, and leaves out those that do not answer."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks

log = logging.getLogger(__name__)

PROBE_S = 0.5
"""Interval at which a partition that was left out is tested."""


class PartitionTurns:
    """The order of the partitions in each read: each of them is the first one in turn.

    Threads: all methods run on the I/O thread.

    Args:
        redis: The Redis client.
        n_partitions: Number of partitions of the queue.
    """

    def __init__(self, redis: Redis, n_partitions: int) -> None:
        self._redis = redis
        self._n_partitions = n_partitions
        self._first = 0
        """The first partition of the last order."""
        self._probes: dict[int, asyncio.Task[None]] = {}
        """Maps a partition that does not answer to the task that waits until it answers again."""

    def next_order(self) -> list[int]:
        """Return the partitions in the order of the next read. If none of them answers, return all."""
        self._first = (self._first + 1) % self._n_partitions
        order = [*range(self._first, self._n_partitions), *range(self._first)]
        return [partition for partition in order if partition not in self._probes] or order

    def leave_out(self, partition: int, stream: str) -> None:
        """Leave out a partition until Redis returns the length of `stream`, which is one of its streams."""
        if partition not in self._probes:
            log.warning("streams.partition_away partition=%d", partition)
            self._probes[partition] = asyncio.create_task(self._probe(partition, stream))

    async def _probe(self, partition: int, stream: str) -> None:
        """Wait until the partition answers."""
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await self._redis.xlen(stream)
            except RedisError as exc:
                log.debug("streams.probe_failed partition=%d error=%s", partition, exc)
            else:
                log.info("streams.partition_back partition=%d", partition)
                del self._probes[partition]
                return

    async def close(self) -> None:
        """End the tests of the partitions that are left out."""
        await cancel_tasks(*self._probes.values())
        self._probes.clear()

    def __repr__(self) -> str:
        return f"<PartitionTurns {self._n_partitions} partitions, left out: {sorted(self._probes)}>"
