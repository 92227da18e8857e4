"""The settings of a queue that its workers and clients must agree on, as its workers have stored them in Redis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from llamaq.common.protocol.embedding_task import JobKind

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from llamaq.common.protocol.keys import Keys


class QueueMode(StrEnum):
    """Whether a queue accepts jobs, and whether its workers claim them."""

    OPEN = "open"
    """Jobs are accepted and claimed."""
    PAUSED = "paused"
    """Jobs are accepted. No job gets its first slot; jobs that had a slot continue."""
    DRAINING = "draining"
    """New jobs are refused. Jobs in the queue are claimed."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The settings of a queue. Each partition has a copy, at `keys.config`.

    Attributes:
        partitions: Number of partitions. Workers and clients with another number would not see all jobs.
        max_queue: Number of waiting jobs in a partition at which submit is refused; 0: no bound.
        lease_ms: Lease of the worker that started last, in ms.
        model: Fingerprint of the model of the worker that started last.
        model_name: Name of this model's file.
        kind: What the jobs of the queue compute. A submit of another kind is refused.
    """

    partitions: int
    max_queue: int
    lease_ms: int
    model: str
    model_name: str
    kind: JobKind = JobKind.GENERATION

    @classmethod
    async def read(cls, redis: Redis, keys: Keys, queue: str, partition: int) -> QueueConfig | None:
        """Return the stored settings of a partition. None: no worker has stored them.

        Raises:
            RedisError: The partition cannot be reached.
        """
        names = ("partitions", "max_queue", "lease_ms", "model", "model_name", "kind")
        values: Any = await redis.hmget(keys.config(queue, partition), names)
        partitions, max_queue, lease_ms, model, model_name, kind = values
        if partitions is None:
            return None
        return cls(
            int(partitions),
            int(max_queue or 0),
            int(lease_ms or 0),
            (model or b"").decode(),
            (model_name or b"").decode(),
            JobKind(kind.decode()) if kind else JobKind.GENERATION,
        )

    def fields(self) -> dict[str, str]:
        """Return the fields of the hash."""
        return {
            "partitions": str(self.partitions),
            "max_queue": str(self.max_queue),
            "lease_ms": str(self.lease_ms),
            "model": self.model,
            "model_name": self.model_name,
            "kind": self.kind.value,
        }
