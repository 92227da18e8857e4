"""Snapshots of queues, workers, slots and caches.

Times are milliseconds since the epoch by the clock of Redis unless a name says otherwise.
"""

from __future__ import annotations

from pydantic import Field

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.wire_model import WireModel


class QueueDepth(WireModel):
    """How many jobs of a queue wait, and how many are with a worker."""

    waiting: int
    running: int


class TickStats(WireModel):
    """Measurements of one tick."""

    batch_size: int
    """Tokens in the batch: `decode_tokens` + `prefill_tokens`."""
    decode_tokens: int
    prefill_tokens: int
    active_slots: int
    queue_depth: int
    """Jobs that wait, as the worker last saw it."""
    eval_ms: float
    """Wall time of `llama_decode` and of sampling."""


class SlotSnapshot(WireModel):
    """One slot as its worker last reported it."""

    index: int
    state: str
    job_id: str | None = None
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    content_tokens: int = 0
    """Tokens of the job that ran here last; of one that runs, those whose cells are there."""


class CacheSnapshot(WireModel):
    """The KV cells of a worker and its prefix cache."""

    n_cells: int
    reserved_cells: int
    """Promised to running jobs, those that they hold already included."""
    used_cells: int = 0
    """Held by running jobs and kept sequences; a shared cell counts once."""
    shared_cells: int = 0
    """What sharing saves: how many more cells there would be if every sequence had its own."""
    entries: int = 0
    """Kept sequences on the device."""
    host_bytes: int = 0
    disk_bytes: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were reused, from any tier."""
    evictions: int = 0
    """Sequences that had to leave the device."""
    preemptions: int = 0
    """Jobs that gave their slot to one of higher priority, to go on later."""


class WorkerCard(WireModel):
    """What a worker is; it does not change while the worker lives."""

    worker: str
    queue: str
    model: str
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_parallel: int
    quantization: str
    chat_template: str | None
    vocab_hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the vocabulary, which lies under `keys.vocab(hash)`."""
    host: str
    pid: int
    device: str
    version: str
    started_ms: int


class Worker(WireModel):
    """A worker's card and its last heartbeat."""

    card: WorkerCard
    slots: tuple[SlotSnapshot, ...] = ()
    cache: CacheSnapshot
    last_tick: TickStats | None = None
    ticks: int = 0
    jobs_done: int = 0
    heartbeat_ms: int
    tick_age_ms: int = 0
    """At the heartbeat: how long ago the last tick began, or the idle engine last woke up."""


class QueueStats(WireModel):
    """A queue at one glance: its depth, its workers, and the stats of the jobs that finished last (newest first)."""

    queue: str
    depth: QueueDepth
    workers: tuple[Worker, ...]
    recent: tuple[JobStats, ...] = ()
