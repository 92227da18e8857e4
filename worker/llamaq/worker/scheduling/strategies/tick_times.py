"""Measures how long ticks take, and predicts how many prompt tokens fit into a tick of a given length.

A worker has five models of times. Each predicts another time, and therefore learns from other ticks:

    TickTimeModel      How many prompt tokens fit into a tick, for `LatencyTarget`. Learns from all ticks without tokens
                       ahead. It also estimates its errors, because a target must be met.
    DecodeTimes        A tick without prompts, and each token ahead in it: for the lengths of drafts, and for the limit
                       of the strategy. Learns from ticks without prompts, for each number of decode tokens separately.
    ForcedTokenGain    What forced tokens save and cost. Learns from ticks without prompts and drafts, and separates
                       those in which llama.cpp reuses its graph from those in which it builds the graph again.
    DraftModelTimes    A step of the draft model. Learns from the work of the draft model, which `DecodeTimes` leaves
                       out.
    TickTimePredictor  The time of the engine in the next tick, for the work between two ticks. It is the time of the
                       last tick, or longer if there is a prompt.

The first three measure a tick from the end of the previous tick, because a stream waits that long for its next token.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

N_DECODE_TICKS = 9
"""The time of the decode tokens is computed from this number of newest ticks without prompt tokens."""
SIMILAR = 2
"""The time of decode tokens is taken from ticks whose number of streams differs by at most this factor."""
N_PREFILL_TICKS = 16
"""The time of one prompt token is computed from this number of newest ticks with prompt tokens."""
DECAY = 0.7
"""Weight of a tick, compared with the next newer one, for the time of one prompt token."""
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
    """From the end of the previous tick to the end of this tick: the time between two tokens of a stream. If the worker
    was idle before, the time begins when this tick is planned."""
    n_ahead: int = 0
    """Number of tokens ahead: draft tokens, which were verified, and tokens that grammars force."""
    draft_model_s: float = 0.0
    """The part of `seconds` that the draft model took."""

    @property
    def n_drafted(self) -> int:
        """The earlier name of `n_ahead`."""
        return self.n_ahead


class TickTimer:
    """Measures ticks.

    Args:
        clock: Returns the time in seconds. Must be monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s: float | None = None

    def begin(self) -> None:
        """Begin a tick, if it did not begin at the end of the previous tick."""
        if self._started_s is None:
            self._started_s = self._clock()

    def end(self, ended_s: float, *, begins_next: bool) -> float:
        """Return the seconds from the beginning of the tick to `ended_s`.

        Args:
            ended_s: When the tick ended, on the clock.
            begins_next: Whether the next tick follows without a pause, so that it begins at `ended_s`.
        """
        seconds = 0.0 if self._started_s is None else ended_s - self._started_s
        self._started_s = ended_s if begins_next else None
        return seconds


class TickTimeModel:
    """Predicts the time of a tick: the time of its decode tokens, and a time for each prompt token.

    Both times are medians, so a single slow tick changes little. The time of a prompt token depends mainly on the
    newest ticks, because attention covers more cells with each chunk. Ticks with many prompt tokens have more weight,
    because the time of a few prompt tokens is shorter than the noise. The errors of the predictions are measured too,
    and plans leave room for 95 % of these errors.
    """

    def __init__(self) -> None:
        self._decode: deque[TickTime] = deque(maxlen=N_DECODE_TICKS)
        self._prefill: deque[TickTime] = deque(maxlen=N_PREFILL_TICKS)
        self._errors: deque[float] = deque([FIRST_ERROR], maxlen=N_ERRORS)
        self.n_since_decode = 0
        """Number of ticks since the last one that computed decode tokens only."""

    def record(self, tick: TickTime) -> None:
        """Learn from a tick. Ticks with tokens ahead are ignored: the time of these tokens cannot be told apart."""
        if tick.n_ahead or tick.draft_model_s:
            return
        if not tick.n_prefill:
            self._decode.append(tick)
            self.n_since_decode = 0
            return
        self.n_since_decode += 1
        if tick.n_decode and self._prefill:
            predicted_s = self._decode_s_or_0(tick.n_decode) + tick.n_prefill * self.prefill_token_s
            self._errors.append(min(tick.seconds / predicted_s, LARGEST_ERROR))
        self._prefill.append(tick)

    def decode_s(self, n_decode: int) -> float | None:
        """Return the seconds of the decode tokens of a tick. None: no tick with a similar number of them is known."""
        times = [one.seconds for one in self._decode if n_decode <= SIMILAR * one.n_decode <= SIMILAR**2 * n_decode]
        return statistics.median(times) if times else None

    def _decode_s_or_0(self, n_decode: int) -> float:
        return (self.decode_s(n_decode) or 0.0) if n_decode else 0.0

    @property
    def prefill_token_s(self) -> float:
        """Seconds of one prompt token: a median with weights. 0 if nothing is known."""
        times = []
        weight = 1.0
        for tick in reversed(self._prefill):
            times.append(
                ((tick.seconds - self._decode_s_or_0(tick.n_decode)) / tick.n_prefill, weight * tick.n_prefill)
            )
            weight *= DECAY
        return max(weighted_median(times), SHORTEST_TOKEN_S)

    @property
    def safety_factor(self) -> float:
        """Measured time divided by predicted time, in the worst of 95 % of the ticks. At least 1."""
        ordered = sorted(self._errors)
        return max(1.0, ordered[min(int(ERROR_RANK * len(ordered)), len(ordered) - 1)])

    def n_prefill_within(self, seconds: float) -> int:
        """Return the number of prompt tokens that take `seconds`, beside the decode tokens. 0 if none fits."""
        if not self._prefill:
            return FIRST_TOKENS
        n_largest = GROWTH * max(tick.n_prefill for tick in self._prefill)
        return max(0, min(int(seconds / self.prefill_token_s), n_largest))

    def __repr__(self) -> str:
        newest = self._decode[-1].n_decode if self._decode else 0
        times_ms = (self._decode_s_or_0(newest) * 1000, self.prefill_token_s * 1000)
        return (
            f"<TickTimeModel {times_ms[0]:.1f} ms for {newest} streams, {times_ms[1]:.3f} ms a prompt token, "
            f"factor {self.safety_factor:.2f}>"
        )


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the value at which half of the weight is reached. `values` are pairs of a value and its weight."""
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0
