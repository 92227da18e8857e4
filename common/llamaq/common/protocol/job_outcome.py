"""How a job ended, what it generated, and what was measured."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue

from llamaq.common.protocol.wire_model import WireModel


class JobState(StrEnum):
    """Where a job is on its way."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a job ended that did not fail."""

    STOP = "stop"
    """An end-of-generation token, a stop string, or the end of the grammar."""
    LENGTH = "length"
    """`max_tokens`, or the context limit of the job."""
    CANCELLED = "cancelled"
    """Somebody called `cancel()`, or the reader went away (`cancel_on_disconnect`)."""
    DEADLINE = "deadline"
    """`timeout_s` of running or `queue_timeout_s` of waiting ran out."""


class CacheTier(StrEnum):
    """Where a reused prefix lay."""

    RUNNING = "running"
    """In the sequence of a job that runs."""
    DEVICE = "device"
    """In a kept sequence."""
    HOST = "host"
    """In the host's memory."""
    DISK = "disk"


class JobStats(WireModel):
    """Measurements of one finished job; rates are tokens per second."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    duration_ms: float = 0.0
    """From the start of the last attempt to its end."""
    ttft_ms: float | None = None
    """Time to first token, from the start of the attempt; add `queue_ms` for the time since submit."""
    prompt_eval_rate: float | None = None
    generation_rate: float | None = None
    """Over the tokens after the first one."""
    prefix_cache_tokens: int = 0
    prefix_cache_ratio: float = 0.0
    prefix_cache_tier: CacheTier | None = None
    """The farthest tier that reused tokens came from; None when none were reused."""
    queue_ms: float = 0.0
    """From submit to the start of the first attempt."""
    seq_id: int | None = None
    slot: int | None = None
    worker: str | None = None
    mode: Literal["stream", "result"] = "stream"
    """Whether the job had per-token events."""


class Result(WireModel):
    """What a job gave."""

    job_id: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: JobStats
    seed: int
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
