"""How long a tick without prompt tokens takes: the time of its decode tokens, and a time for each draft token."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import islice

from llamaq.worker.scheduling.tick_times import weighted_median

N_PLAIN_TICKS = 5
"""Number of newest ticks without drafts whose median is the time of a number of decode tokens."""
N_DRAFT_TICKS = 16
"""Number of newest ticks with drafts that tell the time of a draft token."""
FORGOTTEN_AFTER = 256
"""A measurement is forgotten after this many ticks, because attention covers more cells now, or other programs run."""


class DecodeTimes:
    """Predicts the time of a tick from measured ticks. Both times are medians, so a single slow tick changes little."""

    def __init__(self) -> None:
        self._n_ticks = 0
        self._plain: dict[int, deque[tuple[int, float]]] = {}
        """Maps a number of decode tokens to the newest ticks with this number and no drafts: tick number, seconds."""
        self._drafted: deque[tuple[int, int, float]] = deque(maxlen=N_DRAFT_TICKS)
        """The newest ticks with drafts: number of the tick, draft tokens, seconds of each draft token."""

    def record(self, n_decode: int, n_drafted: int, seconds: float) -> None:
        """Record a tick without prompt tokens."""
        self._n_ticks += 1
        if not n_drafted:
            ticks = self._plain.setdefault(n_decode, deque(maxlen=N_PLAIN_TICKS))
            ticks.append((self._n_ticks, seconds))
            return
        plain_s = self.plain_s(n_decode)
        if plain_s is not None:
            self._drafted.append((self._n_ticks, n_drafted, (seconds - plain_s) / n_drafted))

    def plain_s(self, n_decode: int) -> float | None:
        """Return the seconds of a tick with this number of decode tokens and no drafts. None: not known."""
        times = [seconds for at, seconds in self._plain.get(n_decode, ()) if self._is_new(at)]
        return statistics.median(times) if times else None

    @property
    def draft_token_s(self) -> float | None:
        """The seconds of one draft token. Ticks with many of them count more. None: not known."""
        times = [(seconds, n_drafted) for at, n_drafted, seconds in self._drafted if self._is_new(at)]
        return max(0.0, weighted_median(times)) if times else None

    def _is_new(self, at: int) -> bool:
        return self._n_ticks - at < FORGOTTEN_AFTER

    def __repr__(self) -> str:
        plain = ", ".join(f"{n}: {(self.plain_s(n) or 0) * 1000:.1f} ms" for n in islice(self._plain, 4))
        return f"<DecodeTimes {plain}; {(self.draft_token_s or 0) * 1000:.2f} ms a draft token>"
