"""Limits the rate at which jobs are submitted."""

from __future__ import annotations

from collections.abc import Callable


class SubmitRateLimit:
    """Computes how many jobs may be submitted now. After a pause, at most the jobs of one second may come at once."""

    def __init__(self, rate: float | None, clock: Callable[[], float]) -> None:
        """Start with one job.

        Args:
            rate: Number of jobs per second. None: no limit.
            clock: Returns the time in seconds.
        """
        self._rate = rate
        self._clock = clock
        self._counted_s = clock()
        self._allowance = 1.0

    def __repr__(self) -> str:
        return f"<SubmitRateLimit rate={self._rate} allowance={self._allowance:.2f}>"

    def n_allowed(self, n_wanted: int) -> int:
        """Return how many of `n_wanted` jobs may be submitted now."""
        if self._rate is None:
            return n_wanted
        now_s = self._clock()
        self._allowance = min(self._allowance + (now_s - self._counted_s) * self._rate, max(1.0, self._rate))
        self._counted_s = now_s
        return min(n_wanted, int(self._allowance))

    def count(self, n_submitted: int) -> None:
        """Count jobs that were submitted."""
        self._allowance -= n_submitted

    @property
    def delay_s(self) -> float:
        """Seconds until one more job is allowed. 0: now."""
        return 0.0 if self._rate is None else max(0.0, (1 - self._allowance) / self._rate)
