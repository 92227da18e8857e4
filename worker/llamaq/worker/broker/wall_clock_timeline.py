"""The times at which an ended job was submitted, got its slots, had its first token and ended, on the wall clock."""

from __future__ import annotations

import time

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.engine_loop.telemetry import JobTimeline


def timeline_of(times: JobTimes, stats: JobStats | None) -> JobTimeline:
    """Return the times of a job that has just ended.

    Args:
        times: The times of the last attempt, on the monotonic clock.
        stats: The measurements of the job in this worker. None: the job ended elsewhere.
    """
    now_s, monotonic_s = time.time(), time.monotonic()

    def at(seconds: float | None, more_ms: float | None = 0.0) -> float | None:
        """Return the wall-clock time that is `more_ms` after a monotonic time. None: one of them is not known."""
        return None if seconds is None or more_ms is None else now_s - monotonic_s + seconds + more_ms / 1000

    duration_ms, ttft_ms = (None, None) if stats is None else (stats.duration_ms, stats.ttft_ms)
    return JobTimeline(
        submitted_at=at(times.submitted_s),
        first_slot_at=at(times.submitted_s, times.queue_ms),
        slot_at=at(times.first_slot_s),
        first_token_at=at(times.first_slot_s, ttft_ms),
        ended_at=at(times.first_slot_s, duration_ms) or now_s,
    )
