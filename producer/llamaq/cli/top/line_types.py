"""The lines of the view: one type for each table, and `Overview` with all of them. They are plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotLine:
    """A slot that runs a job."""

    queue: str
    worker: str
    slot: int
    state: str
    job_id: str
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A live worker. The measurements of ticks are means between its last two heartbeats."""

    queue: str
    worker: str
    model: str
    host: str
    device: str
    busy_slots: int
    slots: int
    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    tick_ms: float | None
    decode_per_tick: float | None
    prefill_per_tick: float | None
    used_cells: int
    cells: int
    cached_sequences: int
    host_bytes: int
    disk_bytes: int
    hit_ratio: float | None
    """Share of the admissions that reused computed tokens, since the start of the worker. None: no admission."""
    jobs_done: int
    heartbeat_age_s: float
    tick_age_s: float
    running: tuple[SlotLine, ...]


@dataclass(frozen=True, slots=True)
class TenantLine:
    """A tenant that has jobs in a queue. Jobs that were submitted without a tenant have the tenant with an empty
    name.
    """

    tenant: str
    waiting: int
    """Number of jobs that no worker has claimed."""
    claimed: int


@dataclass(frozen=True, slots=True)
class QueueLine:
    """A queue, or the sum of all queues."""

    queue: str
    mode: str
    waiting: int
    running: int
    delayed: int
    oldest_waiting_s: float | None
    jobs_per_s: float | None
    """Jobs that end per second. None: fewer than two jobs ended lately."""
    eta_s: float | None
    """Seconds until the waiting jobs have ended, at this rate. None: not known. 0: no job waits."""
    tokens_per_s: float | None
    workers: int
    busy_slots: int
    slots: int
    dead_letters: int
    models: tuple[str, ...]
    tenants: tuple[TenantLine, ...] = ()
    """The tenants with the most waiting jobs come first. Empty for the sum of all queues."""


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A waiting job."""

    queue: str
    job_id: str
    priority: str
    age_s: float
    attempt: int
    worker: str | None
    generated_tokens: int
    cancel_requested: bool
    is_delayed: bool
    tenant: str | None


@dataclass(frozen=True, slots=True)
class RecentLine:
    """A job that ended lately."""

    queue: str
    job_id: str
    end: str
    """The finish reason, or the code of the error."""
    has_failed: bool
    age_s: float
    prompt_tokens: int
    generated_tokens: int
    cached_ratio: float
    queue_ms: float
    ttft_ms: float | None
    tokens_per_s: float | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class DeadLine:
    """A dead letter."""

    queue: str
    letter_id: str
    job_id: str | None
    reason: str
    workers: tuple[str, ...]
    age_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the view shows at one moment."""

    now_ms: int
    total: QueueLine
    queues: tuple[QueueLine, ...]
    workers: tuple[WorkerLine, ...]
    waiting: tuple[WaitingLine, ...]
    recent: tuple[RecentLine, ...]
    dead: tuple[DeadLine, ...]
    n_hidden_queues: int = 0
    damaged_queues: tuple[str, ...] = ()
    redis_fullness: float = 0.0

    @property
    def slots(self) -> tuple[SlotLine, ...]:
        """All slots that run a job."""
        return tuple(slot for worker in self.workers for slot in worker.running)
