"""Decides which ticks are published together: short ticks within the stream interval.

To publish means to wake the I/O thread, Redis and the subscribers. With a small model, this would take as long as the
ticks.
"""

from __future__ import annotations

from collections.abc import Callable

from llamaq.worker.engine_loop.tick_time_predictor import TickTimePredictor


class PublicationPace:
    """Tells whether the outputs of a tick can wait for those of the next tick.

    Args:
        interval_s: Tokens of short ticks are published at most this many seconds after the last publication.
        tick_times: Predicts the time of the next tick.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, interval_s: float, tick_times: TickTimePredictor, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._tick_times = tick_times
        self._clock = clock
        self._published_s = clock()
        self.draft_s = 0.0
        """How long the draft model took in the last tick, in seconds."""

    def record(self, published_s: float) -> None:
        """Record the time of a publication."""
        self._published_s = published_s

    @property
    def next_tick_is_in_time(self) -> bool:
        """Whether a tick without a prompt that begins now ends within the interval."""
        next_s = self._clock() + self.draft_s + self._tick_times.predict_s(0)
        return next_s < self._published_s + self._interval_s

    def __repr__(self) -> str:
        return f"<PublicationPace every {self._interval_s * 1000:g} ms>"
