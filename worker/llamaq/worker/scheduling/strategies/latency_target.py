"""The batch strategy that keeps the time between two tokens of a stream below a target."""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.worker.core.batch import Batch
from llamaq.worker.core.slot import Slot, SlotState
from llamaq.worker.scheduling.strategies.batch_strategies import BuiltInStrategy, decode_tokens, prefill_chunks
from llamaq.worker.scheduling.strategies.tick_times import TickTime, TickTimeModel

DEFAULT_TARGET_ITL_MS = 50.0
DELIVERY_S = 0.003
"""By how much the time varies in which a token reaches its subscriber. A tick must end that long before the target."""
DELIVERY_SHARES = (0.1, 0.15)
"""The smallest and the largest part of the target that is left for this."""
PREFILL_SHARE = 0.25
"""Prompts get at least this much time for each second of decoding, even if the target is missed then."""
MAX_TICKS_WITH_PROMPTS = 32
"""After this many ticks with prompt tokens in a row, one tick computes only decode tokens, to measure their time."""


class LatencyTarget(BuiltInStrategy):
    """Gives every running stream its next token in every tick, and prompts as many tokens as the target allows.

    At most 5 % of the gaps between two tokens of a stream should be longer than the target. The strategy measures
    ticks, and computes from these times how many prompt tokens fit into the next tick. While no stream runs, prompts
    get the whole budget. If streams alone take more than 70 % of the target, prompts still get additional time: a
    quarter of the time that the streams need. Then the target is missed, but no prompt waits forever.

    Args:
        target_itl_ms: The target in milliseconds (`--target-itl-ms`).
    """

    def __init__(self, target_itl_ms: float = DEFAULT_TARGET_ITL_MS) -> None:
        self.target_itl_ms = target_itl_ms
        smallest_s, largest_s = (share * target_itl_ms / 1000 for share in DELIVERY_SHARES)
        self._longest_tick_s = target_itl_ms / 1000 - max(smallest_s, min(DELIVERY_S, largest_s))
        self._model = TickTimeModel()

    def record_tick(self, tick: TickTime) -> None:
        """Learn from a tick. See `TickTimeReader.record_tick`."""
        self._model.record(tick)

    def draft_limit_s(self, slots: Sequence[Slot]) -> float:
        """Return how long a tick may take. 0 while prompts are computed: they get the time that the streams leave."""
        if any(slot.state is SlotState.PREFILL for slot in slots):
            return 0.0
        return self._longest_tick_s / self._model.safety_factor

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        decode = decode_tokens(slots, budget)
        room = budget - len(decode)
        n_prefill = min(room, self._n_prefill(len(decode))) if decode else room
        return Batch(decode, prefill_chunks(slots, n_prefill, chunk_size))

    def _n_prefill(self, n_decode: int) -> int:
        """Return the number of prompt tokens for a tick with streams. 0: this tick measures the streams alone."""
        model = self._model
        decode_s = model.decode_s(n_decode)
        if decode_s is None or model.n_since_decode >= MAX_TICKS_WITH_PROMPTS:
            return 0
        tick_s = self._longest_tick_s / model.safety_factor
        return max(1, model.n_prefill_within(max(tick_s - decode_s, PREFILL_SHARE * decode_s)))

    def __repr__(self) -> str:
        return f"<LatencyTarget {self.target_itl_ms:g} ms {self._model!r}>"
