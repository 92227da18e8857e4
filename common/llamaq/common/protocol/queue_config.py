"""The settings of a queue that its workers and clients must agree on, as its workers have stored them in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_request import MAX_PARTITIONS

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
            ProtocolError: The stored settings are damaged.
            RedisError: The partition cannot be reached.
        """
        key = keys.config(queue, partition)
        names = ("partitions", "max_queue", "lease_ms", "model", "model_name", "kind")
        values: Any = await redis.hmget(key, names)
        if values[0] is None:
            return None
        try:
            config = cls._of_fields(values)
        except ValueError as exc:
            raise ProtocolError(
                f"the settings of queue {queue!r} in Redis are damaged ({exc}): delete the key {key}, and start its "
                "workers again"
            ) from exc
        return config

    @classmethod
    def _of_fields(cls, values: Sequence[bytes | None]) -> QueueConfig:
        """Return the settings with these stored values. Raises ValueError if another client has overwritten them."""
        partitions, max_queue, lease_ms, model, model_name, kind = values
        config = cls(
            int(partitions or 0),
            int(max_queue or 0),
            int(lease_ms or 0),
            (model or b"").decode(),
            (model_name or b"").decode(),
            JobKind(kind.decode()) if kind else JobKind.GENERATION,
        )
        if not 1 <= config.partitions <= MAX_PARTITIONS:
            raise ValueError(f"{config.partitions} partitions")
        return config

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
