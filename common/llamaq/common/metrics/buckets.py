"""The upper bounds of the histograms' buckets.

Every duration is counted in milliseconds, so that a counter in Redis is an integer. `scripts/_metrics.lua` counts jobs
that end without a worker, so it has a copy of the bounds of `JOB_TIMES_MS`. A test compares the two lists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

JOB_TIMES_MS = (*(digit * 10**power for power in range(7) for digit in (1, 2, 5)), 10**7)
"""Waits and durations of jobs: from a millisecond to almost three hours."""
SHORT_TIMES_MS = (*(digit * 10**power for power in range(4) for digit in (1, 2, 3, 5, 7)), 10**4)
"""Times between tokens, and durations of ticks: from a millisecond to ten seconds."""
LENGTHS_TOKENS = tuple(2**power for power in range(21))
"""Lengths of prompts and outputs: from one token to a million tokens."""
BATCH_TOKENS = tuple(2**power for power in range(13))
"""Numbers of tokens in a batch: from one to 4096."""

INFINITE = "inf"
"""Name of the last bucket in Redis. It has no upper bound."""


class BucketCounts:
    """Counts values by bucket. One thread adds values; other threads may read the counts at any time."""

    __slots__ = ("_bounds", "counts")

    def __init__(self, bounds: Sequence[int]) -> None:
        """Create the counts, which are zero.

        Args:
            bounds: The upper bounds of the buckets, in ascending order. A last bucket without a bound is added.
        """
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The number of values in each bucket. Values in smaller buckets are not included."""

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1

    def __repr__(self) -> str:
        return f"<BucketCounts {sum(self.counts)} values in {len(self.counts)} buckets>"
