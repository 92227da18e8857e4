"""How much longer a tick takes if it also computes tokens ahead, by their number.

Tokens ahead are draft tokens, which are verified, and tokens that a grammar forces. The time of such a token depends on
how many there are. On a CPU, the model's weights are read from memory once for all rows of a batch, so the first token
adds little, and later ones add their whole computation. On a GPU, the first one adds the most, and later ones add
almost nothing. Therefore the time is measured for few and for many tokens separately.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Self

LONGEST = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The largest number of tokens ahead of each class of ticks. The last class has all larger numbers too."""
N_CLASSES = len(LONGEST)
CLASS_OF = tuple(min(bisect_left(LONGEST, n_tokens), N_CLASSES - 1) for n_tokens in range(LONGEST[-1] + 1))
"""The class of a number of tokens ahead."""
N_OF_CLASS = 7
"""Number of newest ticks of a class that are kept."""
FEW = 2
"""With at most this number of measured ticks in all classes, the shortest time of a class counts instead of the median.
A disturbance only makes ticks longer, and tokens ahead that seem too expensive are not computed for a long time."""


class AheadTimes(NamedTuple):
    """The predicted times of tokens ahead."""

    token_s: tuple[float, ...]
    """The seconds of one token ahead, for each class of ticks."""

    def __repr__(self) -> str:
        times = (f"{longest}: {seconds * 1000:.2f} ms" for longest, seconds in zip(LONGEST, self.token_s, strict=True))
        return f"<AheadTimes {', '.join(times)}>"

    @classmethod
    def constant(cls, token_s: float) -> Self:
        """Return times that do not depend on the number of tokens ahead."""
        return cls((token_s,) * N_CLASSES)

    def seconds(self, n_tokens: int) -> float:
        """Return how many seconds `n_tokens` tokens ahead take in one tick."""
        return n_tokens * self.token_s[class_of(n_tokens)]

    @property
    def least_token_s(self) -> float:
        """The shortest time of a token ahead over all classes, in seconds."""
        return min(self.token_s)

    @property
    def largest_token_s(self) -> float:
        """The longest time of a token ahead over all classes, in seconds."""
        return max(self.token_s)


NO_TIMES = AheadTimes.constant(0.0)
"""Before anything is measured, tokens ahead seem to take no time."""


class MeasuredAheadTimes:
    """Predicts the times of tokens ahead from the newest measured ticks with as many decode tokens.

    Args:
        forgotten_after: A tick is forgotten after this number of further ticks.
    """

    def __init__(self, forgotten_after: int) -> None:
        self._forgotten_after = forgotten_after
        self._ticks: list[deque[tuple[int, float]]] = [deque(maxlen=N_OF_CLASS) for _ in range(N_CLASSES)]
        """For each class: numbers of the ticks, and the seconds of one token ahead."""
        self._times: AheadTimes | None = None
        self._is_valid_until = 0
        """Number of the tick at which `_times` must be computed again, because a tick is forgotten."""
        self._n_last = 0
        """Number of tokens ahead of the last recorded tick."""

    def record(self, tick: int, n_ahead: int, token_s: float) -> None:
        """Record a tick, by its number and the seconds of each of its tokens ahead."""
        self._ticks[class_of(n_ahead)].append((tick, token_s))
        self._n_last = n_ahead
        self._is_valid_until = 0

    def lengthen_last(self, seconds: float) -> None:
        """Add to the time of the last recorded tick how much longer a later tick took because of it."""
        ticks = self._ticks[class_of(self._n_last)]
        if ticks:
            tick, token_s = ticks.pop()
            ticks.append((tick, token_s + seconds / self._n_last))
            self._is_valid_until = 0

    @property
    def are_few(self) -> bool:
        """Whether so few ticks are measured that disturbances of all of them are possible."""
        return sum(map(len, self._ticks)) <= FEW

    def read(self, tick: int) -> AheadTimes | None:
        """Return the predicted times at the tick of this number. None: nothing is known."""
        if tick >= self._is_valid_until:
            for ticks in self._ticks:
                while ticks and tick - ticks[0][0] >= self._forgotten_after:
                    ticks.popleft()
            oldest = min((ticks[0][0] for ticks in self._ticks if ticks), default=tick)
            self._is_valid_until = oldest + self._forgotten_after
            typical = min if self.are_few else median
            self._times = _complete([_typical([seconds for _, seconds in ticks], typical) for ticks in self._ticks])
        return self._times


def class_of(n_tokens: int) -> int:
    """Return the class of ticks with this number of tokens ahead."""
    return CLASS_OF[n_tokens] if n_tokens < len(CLASS_OF) else N_CLASSES - 1


def _typical(times: list[float], typical: Callable[[list[float]], float]) -> float | None:
    """Return the typical one of the times, which is not negative. None: there are no times."""
    return max(0.0, typical(times)) if times else None


def _complete(measured: Sequence[float | None]) -> AheadTimes | None:
    """Return the times of all classes. A class without a measurement has the time of the nearest class with one, and of
    the one with fewer tokens if two are equally near.
    """
    known = [place for place, seconds in enumerate(measured) if seconds is not None]
    if not known:
        return None
    nearest = (min(known, key=lambda other: (abs(other - place), other)) for place in range(N_CLASSES))
    return AheadTimes(tuple([measured[place] or 0.0 for place in nearest]))
