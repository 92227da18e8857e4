"""Measures how long ticks take, and predicts how many prompt tokens fit into a tick of a given length."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

N_DECODE_TICKS = 5
"""Number of newest ticks without prompt tokens that tell the time of the decode tokens."""
N_PREFILL_TICKS = 5
"""Number of newest ticks with prompt tokens that tell the time of one prompt token."""
N_ERRORS = 64
"""Number of newest predictions whose errors give the safety factor."""
ERROR_RANK = 0.95
"""The safety factor is this quantile of the errors, because 95 % of the ticks must meet the target."""
FIRST_ERROR, LARGEST_ERROR = 1.25, 2.0
"""The safety factor before any prediction was checked, and its upper bound. An error is measured / predicted time."""
FIRST_TOKENS = 8
"""Number of prompt tokens in the first measured tick."""
GROWTH = 2
"""The number of prompt tokens grows at most by this factor from tick to tick, because the model may be wrong."""
SHORTEST_TOKEN_S = 1e-9


@dataclass(frozen=True, slots=True)
class TickTime:
    """What one tick computed, and how long it took."""

    n_decode: int
    """Number of decode tokens, one for each running stream."""
    n_prefill: int
    """Number of prompt tokens."""
    seconds: float
    """From the end of the tick before to the end of this one: the time between two tokens of a stream. If the worker
    was idle before, from the plan of this tick."""


class TickTimer:
    """Measures ticks.

    Args:
        clock: Returns the time in seconds. Must be monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s: float | None = None

    def begin(self) -> None:
        """Begin a tick, if it has not begun with the end of the tick before."""
        if self._started_s is None:
            self._started_s = self._clock()

    def end(self, *, begins_next: bool) -> float:
        """Return the seconds since the begin of the tick. `begins_next`: the next tick follows without a pause."""
        now_s = self._clock()
        seconds = now_s - (now_s if self._started_s is None else self._started_s)
        self._started_s = now_s if begins_next else None
        return seconds


class TickTimeModel:
    """Predicts the time of a tick: the time of its decode tokens, and a time for each prompt token.

    The time of a prompt token is a median of few ticks: it changes from tick to tick, because attention covers more
    cells with each chunk, and the median ignores a single slow tick. A tick with prompt tokens may have a cost that
    does not depend on their number; that cost is part of the time of each prompt token, which is then larger in small
    chunks. All errors together are measured: a prediction is multiplied by the factor that covered 95 % of them.
    """

    def __init__(self) -> None:
        self._decode_s: deque[float] = deque(maxlen=N_DECODE_TICKS)
        self._prefill: deque[TickTime] = deque(maxlen=N_PREFILL_TICKS)
        self._errors: deque[float] = deque([FIRST_ERROR], maxlen=N_ERRORS)
        self.n_since_decode = 0
        """Number of ticks since the last one that computed decode tokens only."""

    def record(self, tick: TickTime) -> None:
        """Learn from a tick."""
        if not tick.n_prefill:
            self._decode_s.append(tick.seconds)
            self.n_since_decode = 0
            return
        self.n_since_decode += 1
        if tick.n_decode and self._prefill:
            predicted_s = self.decode_s + tick.n_prefill * self.prefill_token_s
            self._errors.append(min(tick.seconds / predicted_s, LARGEST_ERROR))
        self._prefill.append(tick)

    @property
    def decode_s(self) -> float:
        """Seconds of the decode tokens of a tick. 0 if nothing is known."""
        if not self._decode_s:
            return 0.0
        # Every tick computes decode tokens, so the median is too long if a tick with prompt tokens took less.
        shorter = (tick.seconds for tick in self._prefill if tick.n_decode)
        return min(statistics.median(self._decode_s), *shorter, float("inf"))

    @property
    def prefill_token_s(self) -> float:
        """Seconds of one prompt token. Requires a recorded tick with prompt tokens."""
        decode_s = self.decode_s
        times = [(tick.seconds - (decode_s if tick.n_decode else 0.0)) / tick.n_prefill for tick in self._prefill]
        # Two slow ticks in a row are no accident: the model follows them at once.
        return max(statistics.median(times), min(times[-2:]), SHORTEST_TOKEN_S)

    @property
    def safety_factor(self) -> float:
        """Measured time divided by predicted time, in the worst of 95 % of the ticks. At least 1."""
        ordered = sorted(self._errors)
        return max(1.0, ordered[min(int(ERROR_RANK * len(ordered)), len(ordered) - 1)])

    def n_prefill_within(self, tick_s: float) -> int:
        """Return the number of prompt tokens with which a tick takes `tick_s` seconds. 0 if none fits."""
        if not self._prefill:
            return FIRST_TOKENS
        n_tokens = int((tick_s - self.decode_s) / self.prefill_token_s)
        return max(0, min(n_tokens, GROWTH * max(tick.n_prefill for tick in self._prefill)))

    def __repr__(self) -> str:
        token_us = self.prefill_token_s * 1e6 if self._prefill else 0.0
        return (
            f"<TickTimeModel {self.decode_s * 1000:.1f} ms, {token_us:.0f} us a prompt token, "
            f"factor {self.safety_factor:.2f}>"
        )
