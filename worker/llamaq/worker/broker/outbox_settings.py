"""The settings of the outbox: how long a worker keeps its jobs, when tokens are stored, and when jobs are retried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryDelay:
    """How long a job that failed waits before it is retried. Each further retry waits twice as long."""

    first_s: float
    """Delay of the first retry in seconds."""
    longest_s: float
    """Upper bound on the delay in seconds."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How often the tokens of a job with `stream=False` are stored: after `tokens` tokens or `every_s` seconds."""

    tokens: int
    """Generated tokens between two checkpoints."""
    every_s: float
    """Seconds between two checkpoints."""


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """The settings of one worker's outbox."""

    lease_s: float
    """Time after which a lease expires if it is not renewed, in seconds."""
    disconnect_s: float
    """A job with `cancel_on_disconnect` is cancelled after this many seconds without a subscriber."""
    checkpoints: Checkpoints
    """How often the tokens of jobs with `stream=False` are stored."""
    retry_delay: RetryDelay
    """How long a job that failed waits before it is retried."""

    @property
    def lease_ms(self) -> int:
        """`lease_s` in milliseconds, as the scripts expect it."""
        return int(self.lease_s * 1000)

    @property
    def renew_every_s(self) -> float:
        """Time between two renewals of a lease, in seconds: two renewals may fail before a lease expires."""
        return self.lease_s / 3
