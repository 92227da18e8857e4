"""How long a tick without prompt tokens takes: the time of its decode tokens, and a time for each draft token."""

from __future__ import annotations

from collections import deque
from itertools import islice

from llamaq.worker.scheduling.draft_times import FEW, DraftTimes, MeasuredDraftTimes
from llamaq.worker.scheduling.tick_times import weighted_median

N_PLAIN_TICKS = 5
"""Number of newest ticks without drafts whose median is the time of a number of decode tokens."""
N_DRAFT_TICKS = 16
"""Number of newest ticks with drafts that tell the time of a draft token."""
FORGOTTEN_AFTER = 256
"""A measurement is forgotten after this many ticks, because attention covers more cells now, or other programs run."""


class DecodeTimes:
    """Predicts the time of a tick from measured ticks.

    The times are medians, so a single slow tick changes little. With few measured drafts (`FEW`), the shortest time of
    a draft token counts.
    """

    def __init__(self) -> None:
        self._n_ticks = 0
        self._plain: dict[int, deque[tuple[int, float]]] = {}
        """Maps a number of decode tokens to the newest ticks with this number and no drafts: tick number, seconds."""
        self._drafted: deque[tuple[int, int, float]] = deque(maxlen=N_DRAFT_TICKS)
        """The newest ticks with drafts: number of the tick, draft tokens, seconds of each draft token."""
        self._of_lengths: dict[int, MeasuredDraftTimes] = {}
        """Maps a number of decode tokens to the times of draft tokens in such ticks."""
        self._last_measured = 0
        """Number of decode tokens of the last tick with drafts."""
        self.n_drafted_ticks = 0
        """Number of ticks with drafts so far whose time was compared with that of a tick without drafts."""
        self._draft_token_s: float | None = None
        self._is_valid_until = 0
        """Number of the tick at which `_draft_token_s` must be computed again, because a measurement is forgotten."""

    def record(self, n_decode: int, n_drafted: int, seconds: float) -> None:
        """Record a tick without prompt tokens."""
        self._n_ticks += 1
        if not n_drafted:
            ticks = self._plain.setdefault(n_decode, deque(maxlen=N_PLAIN_TICKS))
            ticks.append((self._n_ticks, seconds))
            return
        plain_s = self.plain_s(n_decode)
        if plain_s is not None:
            self.n_drafted_ticks += 1
            token_s = (seconds - plain_s) / n_drafted
            self._drafted.append((self._n_ticks, n_drafted, token_s))
            self._is_valid_until = self._n_ticks
            of_lengths = self._of_lengths.setdefault(n_decode, MeasuredDraftTimes(FORGOTTEN_AFTER))
            of_lengths.record(self._n_ticks, n_drafted, token_s)
            self._last_measured = n_decode

    def plain_s(self, n_decode: int) -> float | None:
        """Return the seconds of a tick with this number of decode tokens and no drafts. None: not known."""
        times = [seconds for at, seconds in self._plain.get(n_decode, ()) if self._is_new(at)]
        return _median(times) if times else None

    def draft_times(self, n_decode: int) -> DraftTimes | None:
        """Return the times of draft tokens in a tick with this number of decode tokens. None: not measured."""
        measured = self._of_lengths.get(n_decode)
        return None if measured is None else measured.read(self._n_ticks)

    def has_draft_times(self, n_decode: int) -> bool:
        """Whether `draft_times` are known, and from more than a few ticks."""
        return self.draft_times(n_decode) is not None and not self._of_lengths[n_decode].are_few

    @property
    def last_draft_times(self) -> DraftTimes | None:
        """The times of draft tokens in a tick with as many decode tokens as the last measured tick with drafts had."""
        return self.draft_times(self._last_measured)

    @property
    def draft_token_s(self) -> float | None:
        """The seconds of one draft token, for any number of them. Ticks with many count more. None: not known."""
        if self._drafted and self._n_ticks >= self._is_valid_until:
            while self._drafted and not self._is_new(self._drafted[0][0]):
                self._drafted.popleft()
            times = [(seconds, n_drafted) for _, n_drafted, seconds in self._drafted]
            self._draft_token_s = max(0.0, _typical(times)) if times else None
            self._is_valid_until = self._drafted[0][0] + FORGOTTEN_AFTER if times else 0
        return self._draft_token_s

    def _is_new(self, at: int) -> bool:
        return self._n_ticks - at < FORGOTTEN_AFTER

    def __repr__(self) -> str:
        plain = ", ".join(f"{n}: {(self.plain_s(n) or 0) * 1000:.1f} ms" for n in islice(self._plain, 4))
        return f"<DecodeTimes {plain}; {(self.draft_token_s or 0) * 1000:.2f} ms a draft token>"


def _typical(times: list[tuple[float, int]]) -> float:
    """Return the typical time of a draft token. `times` has a time and a number of tokens for each tick."""
    return min(times)[0] if len(times) <= FEW else weighted_median(times)


def _median(values: list[float]) -> float:
    """Return the median. `statistics.median` takes several times as long, and each tick needs it."""
    values.sort()
    middle = values[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) / len(middle)
