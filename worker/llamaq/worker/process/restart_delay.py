"""Delays the restarts of a process that dies again and again."""

from __future__ import annotations

import time

from llamaq.common.backoff import Backoff

FIRST_DELAY_S = 0.1
STEADY_S = 60.0
"""If a process ran for longer than this before it died, its next restart is delayed by `FIRST_DELAY_S` only."""


class RestartDelay:
    """The delay before each restart of one process. It doubles with each restart, up to `longest_s` seconds."""

    def __init__(self, longest_s: float) -> None:
        self._backoff = Backoff(FIRST_DELAY_S, longest_s)
        self._ends_s = 0.0

    def begin(self, lived_s: float = 0.0) -> float:
        """Begin the next delay, and return it in seconds.

        Args:
            lived_s: How long the process ran, in seconds. 0: it could not start.
        """
        if lived_s > STEADY_S:
            self._backoff.reset()
        delay_s = self._backoff.next_delay_s()
        self._ends_s = time.monotonic() + delay_s
        return delay_s

    @property
    def is_over(self) -> bool:
        """Whether the process may start again."""
        return time.monotonic() >= self._ends_s

    def __repr__(self) -> str:
        return f"<RestartDelay {self._backoff!r} over={self.is_over}>"
