"""How long a tick without prompt tokens takes, by the number of tokens in its batch."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque

N_TICKS = 5
"""Number of newest ticks of each size whose median is the time of the size. A single slow tick changes it little."""
FORGOTTEN_AFTER = 512
"""A size is forgotten when this many ticks of other sizes have been recorded since: attention covers more cells now."""
UNKNOWN_TOKEN_COST = 0.1
"""Cost of a further token, as a part of the tick, before a tick with more tokens was measured. Low, so that one is."""


class DecodeTimes:
    """Predicts the time of a tick from the measured ticks of the same size, or of the next smaller and larger sizes."""

    def __init__(self) -> None:
        self._ticks: dict[int, deque[float]] = {}
        self._recorded_at: dict[int, int] = {}
        self._n_recorded = 0
        self._points: list[tuple[int, float]] = []
        """The sizes that were measured, in ascending order, and the time of each. Empty: computed by the next call."""

    def record(self, n_tokens: int, seconds: float) -> None:
        """Record a tick that computed `n_tokens`, none of them a prompt token."""
        self._n_recorded += 1
        self._ticks.setdefault(n_tokens, deque(maxlen=N_TICKS)).append(seconds)
        self._recorded_at[n_tokens] = self._n_recorded
        self._points = []

    def seconds(self, n_tokens: int) -> float:
        """Return the predicted time of a tick. 0 if nothing was measured."""
        points = self._points or self._measured_points()
        if not points:
            return 0.0
        place = bisect_left(points, (n_tokens, 0.0))
        if place == len(points):
            return self._beyond(n_tokens)
        size, time_s = points[place]
        if size == n_tokens or place == 0:
            return time_s
        smaller, smaller_s = points[place - 1]
        return smaller_s + (time_s - smaller_s) * (n_tokens - smaller) / (size - smaller)

    def _measured_points(self) -> list[tuple[int, float]]:
        oldest = self._n_recorded - FORGOTTEN_AFTER
        for size in [size for size, at in self._recorded_at.items() if at <= oldest]:
            del self._ticks[size], self._recorded_at[size]
        self._points = sorted((size, statistics.median(times)) for size, times in self._ticks.items())
        return self._points

    def _beyond(self, n_tokens: int) -> float:
        """Return the time of a tick that is larger than all measured ones."""
        (smallest, smallest_s), (largest, largest_s) = self._points[0], self._points[-1]
        token_s = UNKNOWN_TOKEN_COST * largest_s
        if largest > smallest:
            token_s = max(0.0, largest_s - smallest_s) / (largest - smallest)
        return largest_s + token_s * (n_tokens - largest)

    def __repr__(self) -> str:
        points = ", ".join(f"{size}: {time_s * 1000:.1f} ms" for size, time_s in self._points)
        return f"<DecodeTimes {points}>"
