"""How long ticks take, so that what is done between them is no longer than they are."""

from __future__ import annotations

from llamaq.worker.core.batch import Batch

LARGE_PREFILL = 64
"""From so many prompt tokens on they say how long a tick is, and not what else it does."""
SMOOTHING = 0.25
IDLE_S = 0.002
"""What stands for a tick's length where nothing is computed."""


class TickTimes:
    """Remembers what llama.cpp and sampling took, and guesses what they will take."""

    def __init__(self) -> None:
        self._last_s = IDLE_S
        self._prefill_token_s = 0.0

    def saw(self, batch: Batch, eval_s: float) -> None:
        """A batch took so long; an empty one takes no time."""
        self._last_s = eval_s if batch else IDLE_S
        if batch.n_prefill >= LARGE_PREFILL:
            now_s = eval_s / batch.n_tokens
            step = SMOOTHING if self._prefill_token_s else 1.0
            self._prefill_token_s += step * (now_s - self._prefill_token_s)

    def guess(self, n_prefill: int) -> float:
        """How long a tick will take that reads so many prompt tokens."""
        return max(self._last_s, n_prefill * self._prefill_token_s)

    def __repr__(self) -> str:
        return f"<TickTimes last {self._last_s * 1000:.1f} ms, {self._prefill_token_s * 1e6:.0f} us a prompt token>"
