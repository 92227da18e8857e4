"""What the view has read from Redis at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from llamaq.common.protocol.job_status import DeadLetter, JobSummary
from llamaq.common.protocol.queue_and_worker_state import QueueDepth, RecentJob, Worker


@dataclass(frozen=True, slots=True)
class QueueReading:
    """One queue."""

    queue: str
    depth: QueueDepth
    workers: tuple[Worker, ...]
    recent: tuple[RecentJob, ...]
    """The jobs that ended last, newest first."""
    oldest_waiting_s: float | None = None
    """Seconds that the oldest waiting job has waited. None: no job waits."""
    n_dead: int = 0
    """Number of dead letters."""
    waiting: tuple[JobSummary, ...] = ()
    """The oldest waiting jobs, if the view shows them."""
    dead: tuple[DeadLetter, ...] = ()
    """The newest dead letters, if the view shows them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All queues that the view shows."""

    now_ms: int
    """Time of the reading in milliseconds since the epoch, by the clock of Redis."""
    queues: tuple[QueueReading, ...]
    n_hidden_queues: int = 0
    """Number of queues that were not read, because there are more than the view reads."""
    damaged_queues: tuple[str, ...] = ()
    """Names of the queues that cannot be read, because another client of Redis has overwritten their keys."""
    redis_fullness: float = 0.0
    """Used share of the `maxmemory` of the fullest Redis server; 0 if there is no limit or it is not known."""
