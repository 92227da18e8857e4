"""Which cells are worth saving: those that are saved faster than computed again.

llama.cpp copies each range of adjacent cells, in each layer, by itself. The cells of a prompt are adjacent, because
chunks of it are computed at once. If several jobs generate, the cells of their tokens alternate, so each is a range of
its own: they are scattered. On a CPU a copy takes less than a microsecond. On a GPU each one waits for the device.
Measured with 28 layers: 2.7 ms for a block of a prompt, and 70 ms for a block of generated tokens, during which all
streams wait. To compute such a block again takes 3 ms.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

CHEAP_TOKEN_S = 80e-6
"""Cells that are saved at least this fast are always saved: 5 ms for a block of 64 tokens."""
N_SAMPLES = 3
"""Number of newest measurements whose median counts. Until there are as many, all cells are saved."""
MIN_SAMPLE_TOKENS = 16
"""A block with fewer scattered cells is not a measurement."""
TRIAL_EVERY_S = 60.0
"""After this time, scattered cells that are not worth saving are saved and measured again."""


class SaveCosts:
    """Measures how long it takes to save scattered cells, and decides whether they are worth it.

    Args:
        clock: A monotonic clock in seconds.

    Attributes:
        prefill_token_s: The time in which a token of a prompt is computed, in seconds. 0: not known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefill_token_s = 0.0
        self._clock = clock
        self._token_s: deque[float] = deque(maxlen=N_SAMPLES)
        """The seconds of one scattered cell in the newest measurements."""
        self._measured_s = 0.0
        """When the last block was measured, on the clock."""

    def record(self, n_scattered: int, seconds: float) -> None:
        """Record how long it took to save a block with this number of scattered cells."""
        if n_scattered >= MIN_SAMPLE_TOKENS:
            self._token_s.append(seconds / n_scattered)
            self._measured_s = self._clock()

    def is_worth_saving(self, n_tokens: int, n_scattered: int) -> bool:
        """Return whether a block of `n_tokens` tokens, of which `n_scattered` have scattered cells, is to be saved."""
        if not n_scattered or len(self._token_s) < N_SAMPLES:
            return True
        worth_s = n_tokens * max(CHEAP_TOKEN_S, self.prefill_token_s)
        return n_scattered * median(self._token_s) <= worth_s or self._clock() - self._measured_s >= TRIAL_EVERY_S

    def __repr__(self) -> str:
        token_us = median(self._token_s) * 1e6 if self._token_s else 0.0
        return f"<SaveCosts {token_us:.0f} us a scattered cell, {self.prefill_token_s * 1e6:.0f} us to compute>"
