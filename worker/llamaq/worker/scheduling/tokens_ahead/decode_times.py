"""How long a tick without prompt tokens takes: the time of its decode tokens, and a time for each token ahead.

Tokens ahead also make the next ticks longer: the cells of the tokens that were not accepted are removed, and llama.cpp
builds its compute graph again, because the batch has another shape. This is part of the time of the tokens ahead.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from llamaq.worker.scheduling.tokens_ahead.ahead_times import AheadTimes, MeasuredAheadTimes

N_PLAIN_TICKS = 5
"""Number of newest ticks without tokens ahead whose median is the time of a number of decode tokens."""
N_SETTLING = 2
"""Number of ticks after one with tokens ahead that may take longer because of it. On a GPU, llama.cpp builds the graph
in the first one, and the device may record it in the second one."""
FORGOTTEN_AFTER = 256
"""A measurement is forgotten after this many ticks, because attention covers more cells now, or other programs run."""


class DecodeTimes:
    """Predicts the time of a tick from measured ticks.

    The times are medians, so a single slow tick changes little.
    """

    def __init__(self) -> None:
        self._n_ticks = 0
        self._plain: dict[int, deque[tuple[int, float]]] = {}
        """Maps a number of decode tokens to the newest ticks with it and no tokens ahead: tick number, seconds."""
        self._ahead: dict[int, MeasuredAheadTimes] = {}
        """Maps a number of decode tokens to the times of tokens ahead in such ticks."""
        self._last_measured = 0
        """Number of decode tokens of the last tick with tokens ahead."""
        self._n_settling = 0
        """Number of next ticks that may take longer because of the last tick with tokens ahead."""
        self.n_ahead_ticks = 0
        """Number of ticks with tokens ahead so far whose time was compared with that of a tick without tokens ahead."""

    def record(self, n_decode: int, n_ahead: int, seconds: float) -> None:
        """Record a tick without prompt tokens."""
        self._n_ticks += 1
        plain_s = self.plain_s(n_decode)
        if n_ahead:
            self._record_ahead(n_decode, n_ahead, seconds, plain_s)
        elif self._n_settling and plain_s is not None and n_decode == self._last_measured:
            self._n_settling -= 1
            self._ahead[n_decode].lengthen_last(seconds - plain_s)
        else:
            self._n_settling = 0
            ticks = self._plain.setdefault(n_decode, deque(maxlen=N_PLAIN_TICKS))
            ticks.append((self._n_ticks, seconds))

    def _record_ahead(self, n_decode: int, n_ahead: int, seconds: float, plain_s: float | None) -> None:
        """Record a tick with tokens ahead, if the time of a tick without them is known."""
        if plain_s is None:
            self._n_settling = 0
            return
        self.n_ahead_ticks += 1
        measured = self._ahead.setdefault(n_decode, MeasuredAheadTimes(FORGOTTEN_AFTER))
        measured.record(self._n_ticks, n_ahead, (seconds - plain_s) / n_ahead)
        self._last_measured = n_decode
        self._n_settling = N_SETTLING

    def plain_s(self, n_decode: int) -> float | None:
        """Return the seconds of a tick with this number of decode tokens and no tokens ahead. None: not known."""
        times = [seconds for at, seconds in self._plain.get(n_decode, ()) if self._is_new(at)]
        return _median(times) if times else None

    def ahead_times(self, n_decode: int) -> AheadTimes | None:
        """Return the times of tokens ahead in a tick with this number of decode tokens. None: not known.

        If no such tick was measured, the times are those of the newest ticks with tokens ahead.
        """
        return self._read(n_decode) or self._read(self._last_measured)

    def has_ahead_times(self, n_decode: int) -> bool:
        """Whether more than a few ticks with this number of decode tokens and with tokens ahead were measured."""
        return self._read(n_decode) is not None and not self._ahead[n_decode].are_few

    def _read(self, n_decode: int) -> AheadTimes | None:
        measured = self._ahead.get(n_decode)
        return None if measured is None else measured.read(self._n_ticks)

    def _is_new(self, at: int) -> bool:
        return self._n_ticks - at < FORGOTTEN_AFTER

    def __repr__(self) -> str:
        plain = ", ".join(f"{n}: {(self.plain_s(n) or 0) * 1000:.1f} ms" for n in islice(self._plain, 4))
        return f"<DecodeTimes {plain}; tokens ahead {self._read(self._last_measured)!r}>"


def _median(values: list[float]) -> float:
    """Return the median. `statistics.median` takes several times as long, and each tick needs it."""
    values.sort()
    middle = values[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) / len(middle)
