"""The sums of the measurements of all ticks, for the heartbeat."""

from __future__ import annotations

from llamaq.common.metrics.buckets import BATCH_TOKENS, SHORT_TIMES_MS, BucketCounts
from llamaq.common.protocol.queue_and_worker_state import TickStats, TickTotals


class TickSums:
    """Adds up the measurements of ticks.

    Threads: one thread adds. Another thread may read the totals meanwhile, which may then lack parts of the last tick.
    """

    def __init__(self) -> None:
        self._decode_tokens = 0
        self._prefill_tokens = 0
        self._drafts = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._eval_ms = 0.0
        self._tick_times = BucketCounts(SHORT_TIMES_MS)
        self._batch_sizes = BucketCounts(BATCH_TOKENS)

    def add(self, stats: TickStats) -> None:
        """Add the measurements of a tick."""
        self._decode_tokens += stats.decode_tokens
        self._prefill_tokens += stats.prefill_tokens
        self._drafts += stats.drafts
        self._drafted_tokens += stats.drafted_tokens
        self._accepted_tokens += stats.accepted_tokens
        self._eval_ms += stats.eval_ms
        self._tick_times.add(stats.eval_ms)
        self._batch_sizes.add(stats.batch_size)

    def totals(self) -> TickTotals:
        """Return the sums so far."""
        return TickTotals(
            decode_tokens=self._decode_tokens,
            prefill_tokens=self._prefill_tokens,
            drafts=self._drafts,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            eval_ms=self._eval_ms,
            tick_time_counts=tuple(self._tick_times.counts),
            batch_size_counts=tuple(self._batch_sizes.counts),
        )

    def __repr__(self) -> str:
        return f"<TickSums {self._decode_tokens} decode tokens, {self._prefill_tokens} prompt tokens>"
