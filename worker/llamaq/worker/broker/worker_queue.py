"""The queue that a worker serves, as the services of the Redis side use it."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import QueueDepth
from llamaq.common.protocol.queue_depth import queue_depth


@dataclass(frozen=True, slots=True)
class WorkerQueue:
    """A queue in Redis.

    Attributes:
        redis: The Redis client.
        keys: The names of the keys.
        name: Name of the queue.
        n_partitions: Number of partitions of the queue.
    """

    redis: Redis
    keys: Keys
    name: str
    n_partitions: int

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return range(self.n_partitions)

    def job_stream(self, partition: int, priority: Priority) -> str:
        """Return the key of the job stream of one partition and priority."""
        return self.keys.jobs(self.name, partition, priority)

    def partition_of(self, stream: str) -> int:
        """Return the partition of a job stream.

        Raises:
            LookupError: It is no job stream of this queue.
        """
        found = self.keys.partition_of(stream)
        if found is None or found[0] != self.name:
            raise LookupError(f"{stream} is no job stream of {self!r}")
        return found[1]

    async def depth(self) -> QueueDepth:
        """Return the numbers of waiting, running and delayed jobs of the queue.

        Raises:
            RedisError: A partition did not answer.
        """
        return await queue_depth(self.redis, self.keys, self.name, self.n_partitions)

    def __repr__(self) -> str:
        return f"<WorkerQueue {self.name!r} partitions={self.n_partitions}>"
