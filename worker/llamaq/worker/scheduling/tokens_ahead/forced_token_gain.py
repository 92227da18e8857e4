"""Predicts whether forced tokens gain time, from the times of earlier ticks.

llama.cpp reuses its compute graph, and on a GPU the CUDA graph, while each batch has as many tokens as the one before.
A tick with forced tokens has more. So llama.cpp builds the graph again for this tick, and once more for the next tick
without forced tokens. On a GPU, this may take longer than the ticks that forced tokens save. On a CPU, it is a small
part of a tick.
"""

from __future__ import annotations

from llamaq.worker.scheduling.tokens_ahead.ahead_times import LONGEST, N_CLASSES, class_of
from llamaq.worker.scheduling.tokens_ahead.decode_times import FORGOTTEN_AFTER

LEAST_LOSS = 1.25
"""Forced tokens do not pay if they cost more than this many times the time that they save. With a smaller factor, noise
would turn them off where they gain."""
N_KEPT, N_LEAST = 7, 3
"""Number of newest measurements of each time that are kept, and the smallest number that suffices for an estimate."""
TYPICAL, LOW = 0.5, 0.25
"""Ranks among the measurements. The costs of forced tokens are of rank `LOW`, because a disturbance only makes ticks
longer. Forced tokens that seem too expensive would not be measured again for a long time."""
N_SETTLING = 2
"""Number of first ticks of a new shape that are not measured as ticks with a reused graph. In the second one,
the device may still record its graph."""
PLAIN_PERIOD, N_PLAIN = 64, 8
"""While the time of ticks with a reused graph is not known, the last `N_PLAIN` of `PLAIN_PERIOD` ticks have no forced
tokens, so that this time is measured. With many streams, nearly every tick could have forced tokens."""
SIMILAR = 8
"""Numbers of decode tokens are similar if they differ by at most one for each `SIMILAR` of them. The time of a tick is
about the same then."""


class _Measurements:
    """The newest measurements of a time. One thread may record while another one reads."""

    def __init__(self) -> None:
        self._newest: tuple[tuple[int, float], ...] = ()
        """Numbers of the ticks, and seconds. It is replaced and never changed."""

    def record(self, tick: int, seconds: float) -> None:
        """Record a measurement of the tick of this number."""
        self._newest = (*self._newest[1 - N_KEPT :], (tick, seconds))

    def read(self, tick: int, rank: float) -> float | None:
        """Return the time of this rank, 0 for the shortest and 1 for the longest. None: too few are known."""
        times = [seconds for at, seconds in self._newest if tick - at < FORGOTTEN_AFTER]
        if len(times) < N_LEAST:
            return None
        times.sort()
        return times[int((len(times) - 1) * rank)]


class _Times:
    """What is measured for a number of decode tokens."""

    def __init__(self) -> None:
        self.plain = _Measurements()
        """Ticks without forced tokens whose graph is reused."""
        self.after = _Measurements()
        """How much longer a tick takes if the tick before had forced tokens."""
        self.forced_token = [_Measurements() for _ in range(N_CLASSES)]
        """How much longer a tick takes for each of its forced tokens, for each class of `ahead_times`."""

    def forced_s(self, tick: int, n_forced: int) -> float | None:
        """Return a lower bound on how much longer a tick takes with forced tokens. None: nothing is measured.

        If no tick of the same class is measured, the bound is the time of a class with fewer tokens. Without such a
        class, it comes from a class with more tokens, where each token takes less time.
        """
        place = class_of(n_forced)
        for fewer in range(place, -1, -1):
            token_s = self.forced_token[fewer].read(tick, LOW)
            if token_s is not None:
                return max(0.0, token_s) * (n_forced if fewer == place else LONGEST[fewer])
        for more in range(place + 1, N_CLASSES):
            token_s = self.forced_token[more].read(tick, LOW)
            if token_s is not None:
                return max(0.0, token_s) * n_forced
        return None


class ForcedTokenGain:
    """Compares the time that forced tokens save with the time that they cost.

    They save the ticks that would otherwise generate them, in which llama.cpp reuses its graph. Compared with such a
    tick, their own tick takes longer, and so does the tick after it: this is what they cost. As long as the cost is not
    known, forced tokens pay, so that it is measured. Each measurement is forgotten after `FORGOTTEN_AFTER` ticks, so
    forced tokens that do not pay are tried again.

    Threads: while the engine thread calls `pays_off` during repeated ticks, another thread may record earlier ones of
    these ticks. There is no other concurrent call.
    """

    def __init__(self) -> None:
        self._n_ticks = 0
        self._times: dict[int, _Times] = {}
        """Maps a number of decode tokens to its times."""
        self._last_measured = 0
        """Number of decode tokens of the last measured tick with forced tokens."""
        self._n_decode = 0
        """Number of decode tokens of the last tick."""
        self._n_alike = 0
        """Number of last ticks with these decode tokens and nothing else."""
        self._is_after_forced = False
        self._n_unknown = 0
        """Number of last ticks for which the time without forced tokens was not known."""

    def pays_off(self, n_decode: int, n_forced: int) -> bool:
        """Return whether a tick with this number of decode tokens should have this number of forced tokens."""
        tick = self._n_ticks
        plain_s = self._plain_s(tick, n_decode)
        if plain_s is None:
            return self._n_unknown % PLAIN_PERIOD < PLAIN_PERIOD - N_PLAIN
        forced_s = self._forced_s(tick, n_decode, n_forced)
        if forced_s is None:
            return True
        return forced_s + self._after_s(tick, n_decode) <= LEAST_LOSS * n_forced * plain_s / n_decode

    def record(self, n_decode: int, n_forced: int, seconds: float) -> None:
        """Record a tick without prompt tokens and drafts."""
        self._n_ticks = tick = self._n_ticks + 1
        times = self._times.get(n_decode)
        if times is None:
            times = self._times[n_decode] = _Times()
        plain_s = self._plain_s(tick, n_decode)
        self._n_unknown = self._n_unknown + 1 if plain_s is None else 0
        if n_forced:
            if plain_s is not None:
                times.forced_token[class_of(n_forced)].record(tick, (seconds - plain_s) / n_forced)
                self._last_measured = n_decode
            self._n_alike = 0
        else:
            if n_decode != self._n_decode:
                self._n_alike = 0
            if self._is_after_forced and plain_s is not None:
                times.after.record(tick, seconds - plain_s)
            if self._n_alike >= N_SETTLING:
                times.plain.record(tick, seconds)
            self._n_alike += 1
        self._n_decode = n_decode
        self._is_after_forced = n_forced > 0

    def record_other(self) -> None:
        """Record a tick of another shape: it has prompt tokens or drafts. Call this too if ticks were not recorded."""
        self._n_ticks += 1
        self._n_alike = 0
        self._is_after_forced = False

    def _plain_s(self, tick: int, n_decode: int) -> float | None:
        """Return the seconds of a tick without forced tokens whose graph is reused. None: not known.

        If no tick with this number of decode tokens was measured, it is the time for the nearest similar number.
        """
        own = self._times.get(n_decode)
        plain_s = None if own is None else own.plain.read(tick, TYPICAL)
        if plain_s is not None:
            return plain_s
        for difference in range(1, n_decode // SIMILAR + 1):
            for number in (n_decode + difference, n_decode - difference):
                times = self._times.get(number)
                plain_s = None if times is None else times.plain.read(tick, TYPICAL)
                if plain_s is not None:
                    return plain_s
        return None

    def _forced_s(self, tick: int, n_decode: int, n_forced: int) -> float | None:
        """Return how much longer a tick takes with forced tokens, or took in the last such tick. None: not known."""
        for number in (n_decode, self._last_measured):
            times = self._times.get(number)
            forced_s = None if times is None else times.forced_s(tick, n_forced)
            if forced_s is not None:
                return forced_s
        return None

    def _after_s(self, tick: int, n_decode: int) -> float:
        """Return how much longer a tick takes after one with forced tokens. 0 if it is not known."""
        for number in (n_decode, self._last_measured):
            times = self._times.get(number)
            after_s = None if times is None else times.after.read(tick, LOW)
            if after_s is not None:
                return max(0.0, after_s)
        return 0.0

    def __repr__(self) -> str:
        tick, n_decode = self._n_ticks, self._last_measured or self._n_decode
        plain_s, forced_s = self._plain_s(tick, n_decode), self._forced_s(tick, n_decode, 1)
        return (
            f"<ForcedTokenGain {n_decode} decode tokens {(plain_s or 0) * 1000:.2f} ms, a forced one "
            f"{(forced_s or 0) * 1000:.2f} ms, the tick after it {self._after_s(tick, n_decode) * 1000:.2f} ms>"
        )
