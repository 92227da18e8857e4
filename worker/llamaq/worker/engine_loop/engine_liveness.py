"""Tells whether the engine thread hangs: whether its tick takes much longer than all ticks before."""

from __future__ import annotations

from collections.abc import Callable

SLOW_TICKS = 4
"""A tick counts as a hang only when it takes longer than this factor times the slowest earlier tick."""


class EngineLiveness:
    """Records when the engine thread last showed that it runs.

    Threads: the engine thread calls the methods. Any thread may read the properties and `alive_s`.

    Args:
        hang_s: The shortest time, in seconds, after which a tick counts as a hang.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, hang_s: float, clock: Callable[[], float]) -> None:
        self._hang_s = hang_s
        self._clock = clock
        self._slowest_tick_s = 0.0
        self.alive_s = clock()
        """When the engine thread last showed that it runs."""

    def show_alive(self) -> None:
        """Record that the engine thread runs. Called before a tick, and within long work between two ticks."""
        self.alive_s = self._clock()

    def end_tick(self) -> None:
        """Record that a tick has ended. It began at the last call of this method or of `show_alive`.

        If the tick took longer than `hang_after_s`, the whole process was probably paused, for example its container.
        """
        now_s = self._clock()
        self._slowest_tick_s = max(self._slowest_tick_s, min(now_s - self.alive_s, self.hang_after_s))
        self.alive_s = now_s

    @property
    def is_alive(self) -> bool:
        """Whether the engine does not hang: its thread showed less than `hang_after_s` ago that it runs."""
        return self.tick_age_s < self.hang_after_s

    @property
    def hang_after_s(self) -> float:
        """After how many seconds a tick counts as a hang."""
        return max(self._hang_s, SLOW_TICKS * self._slowest_tick_s)

    @property
    def tick_age_s(self) -> float:
        """How many seconds ago the engine thread last showed that it runs."""
        return self._clock() - self.alive_s

    def __repr__(self) -> str:
        return f"<EngineLiveness {self.tick_age_s:.3f}/{self.hang_after_s:.3f} s>"
