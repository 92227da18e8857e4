"""Predicts how long the engine computes in the next tick.

The scheduler may move KV cells for this time between two ticks. The tick loop publishes the tokens of several short
ticks together. The module `tick_times` of the strategies compares this model with the other models of times.
"""

from __future__ import annotations

from llamaq.worker.core.batch import TickBatch

MIN_PREFILL_TOKENS = 64
"""Ticks with fewer prompt tokens are ignored when the time of one prompt token is estimated."""
SMOOTHING = 0.25
"""Weight of the newest tick in the moving average of the time of one prompt token."""
IDLE_TICK_S = 0.002
"""The predicted time of a tick after a tick that computed nothing."""


class TickTimePredictor:
    """Predicts the time of the next tick from that of the last one, and from the time of a prompt token."""

    def __init__(self) -> None:
        self._last_tick_s = IDLE_TICK_S
        self.prefill_token_s = 0.0
        """The time of one prompt token, in seconds. 0: not known."""

    def record(self, batch: TickBatch, eval_s: float) -> None:
        """Record that the engine computed `batch` in `eval_s` seconds. The batch may be empty."""
        self._last_tick_s = eval_s if batch else IDLE_TICK_S
        if batch.n_prefill >= MIN_PREFILL_TOKENS:
            token_s = eval_s / batch.n_tokens
            weight = SMOOTHING if self.prefill_token_s else 1.0
            self.prefill_token_s += weight * (token_s - self.prefill_token_s)

    def predict_s(self, n_prefill: int) -> float:
        """Return the predicted time of a tick with `n_prefill` prompt tokens, in seconds.

        The prediction is never shorter than the last tick.
        """
        return max(self._last_tick_s, n_prefill * self.prefill_token_s)

    def __repr__(self) -> str:
        last_ms, token_us = self._last_tick_s * 1000, self.prefill_token_s * 1e6
        return f"<TickTimePredictor last {last_ms:.1f} ms, {token_us:.0f} us a prompt token>"
