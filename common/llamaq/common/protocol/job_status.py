"""Snapshots of a job and of a dead letter."""

from __future__ import annotations

from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.wire_model import WireModel


class JobStatus(WireModel):
    """A snapshot of a job."""

    job_id: str
    state: JobState
    attempt: int = 0
    worker: str | None = None
    crashes: int = 0
    """Workers that died with it in a row, without it having stored a token."""
    generated_tokens: int = 0
    submitted_ms: int | None = None
    started_ms: int | None = None
    finished_ms: int | None = None
    cancel_requested: bool = False
    finish_reason: FinishReason | None = None
    error: Failed | None = None


class DeadLetter(WireModel):
    """What was given up: a job that workers died of, or an entry that was no job."""

    id: str
    """What `show`, `retry` and `purge` take: the job's id, or for what was no job QUEUE.PARTITION.ENTRY."""
    job_id: str | None
    """None for what was no job."""
    reason: str
    workers: tuple[str, ...] = ()
    """Those that died with the job, in order."""
    dead_ms: int
    partition: int
    entry: str
    """Its entry in the partition's stream of dead letters."""


class DeadLetterDetails(DeadLetter):
    """All that is kept of a dead letter."""

    request: JobRequest | None = None
    """None for what was no job, and for a job that has expired."""
    text: str = ""
    """What the job had generated."""
    tokens: tuple[int, ...] = ()
    held: str = ""
    """What an entry held that was no job, cut to 4 KiB."""
