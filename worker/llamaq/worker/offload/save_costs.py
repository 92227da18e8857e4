"""Decides which blocks a worker on a GPU saves: blocks that take clearly longer to compute than to save.

llama.cpp copies each range of adjacent cells, in each layer, by itself, and waits for the device each time. The cells
of a prompt are adjacent, because chunks of it are computed at once. If several jobs generate, the cells of their tokens
alternate, so each is a range of its own: they are scattered. Measured with a model of 1.7 B parameters: it takes 2.7 ms
to save a block of a prompt, 70 ms to save a block of generated tokens, and 3 ms to compute such a block. Meanwhile all
streams wait.

On a CPU, all copies are a small part of the time in which a prompt is computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

LEAST_GAIN, LEAST_GAIN_IDLE = 2, 1
"""A block is saved if computing it takes at least this many times as long as saving it, while jobs run and while no job
runs. Loading a block takes as long as saving it, so with 2 a save pays if the block is loaded once. In an idle worker,
a save delays no job."""
N_SAMPLES = 3
"""Number of newest measurements whose median counts. Until there are as many, blocks are saved."""
MIN_SAMPLE_TOKENS = 16
"""A block with fewer tokens is not a measurement."""
TRIAL_EVERY_S = 60.0
"""After this time without a measurement, a block is saved in any case, as a measurement."""


class _CellTime:
    """The measured time in which one cell is saved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=N_SAMPLES)
        self._measured_s = clock()

    def record(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._measured_s = self._clock()

    def read(self) -> float:
        """Return the seconds. 0: they must be measured."""
        is_known = len(self._seconds) == N_SAMPLES and self._clock() - self._measured_s < TRIAL_EVERY_S
        return median(self._seconds) if is_known else 0.0


class SaveCosts:
    """Measures how long it takes to save cells, and decides which blocks are worth it.

    Args:
        clock: A monotonic clock in seconds.

    Attributes:
        are_measured: Whether the time of a save counts. Then the device must be idle when the save begins.
        prefill_token_s: The time in which a token of a prompt is computed, in seconds. 0: not known.
    """

    are_measured = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefill_token_s = 0.0
        self._adjacent, self._scattered = _CellTime(clock), _CellTime(clock)

    def record(self, n_tokens: int, n_scattered: int, seconds: float) -> None:
        """Record how long it took to save a block of `n_tokens` tokens, `n_scattered` of them with scattered cells."""
        if n_scattered >= MIN_SAMPLE_TOKENS:
            self._scattered.record(seconds / n_scattered)
        elif not n_scattered and n_tokens >= MIN_SAMPLE_TOKENS:
            self._adjacent.record(seconds / n_tokens)

    def is_worth_saving(self, n_tokens: int, n_scattered: int, *, is_idle: bool = False) -> bool:
        """Return whether to save a block.

        Args:
            n_tokens: Number of its tokens.
            n_scattered: Number of its tokens that have scattered cells.
            is_idle: Whether no job runs.
        """
        if not self.prefill_token_s:
            return True
        save_s = (n_tokens - n_scattered) * self._adjacent.read()
        if n_scattered:
            save_s += n_scattered * self._scattered.read()
        least_gain = LEAST_GAIN_IDLE if is_idle else LEAST_GAIN
        return least_gain * save_s <= n_tokens * self.prefill_token_s

    def __repr__(self) -> str:
        times_us = [round(one * 1e6) for one in (self._adjacent.read(), self._scattered.read(), self.prefill_token_s)]
        return f"<SaveCosts microseconds to save adjacent and scattered cells, and to compute them: {times_us}>"


class NoSaveCosts:
    """Replaces `SaveCosts` where saves cost little: every block is worth saving, and no save is measured."""

    are_measured = False
    prefill_token_s = 0.0

    def record(self, n_tokens: int, n_scattered: int, seconds: float) -> None:
        """Do nothing."""

    def is_worth_saving(self, n_tokens: int, n_scattered: int, *, is_idle: bool = False) -> bool:  # noqa: ARG002
        return True
