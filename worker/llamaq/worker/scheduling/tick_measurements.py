"""Measures each tick: its time, and how many slots had a job."""

from __future__ import annotations

from collections.abc import Callable

from llamaq.worker.core.batch import Batch
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.bulk_share import BulkShare, count_bulk
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy
from llamaq.worker.scheduling.strategies.tick_times import TickTimer
from llamaq.worker.scheduling.tokens_ahead.tokens_ahead import TokensAhead
from llamaq.worker.scheduling.waiting_queue import WaitingQueue


class TickMeasurements:
    """Reports each tick: its time to the strategy and to the search for tokens ahead, its slots to the bulk share.

    Args:
        memory: The slots and the KV memory.
        waiting: The jobs without a slot.
        strategy: Plans the batches, perhaps by the times of earlier ticks.
        bulk_share: Counts the slots of each tick.
        tokens_ahead: Adds forced tokens and drafts to the batches, by the times of earlier ticks.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        memory: KvMemory,
        waiting: WaitingQueue,
        strategy: GuardedStrategy,
        bulk_share: BulkShare,
        tokens_ahead: TokensAhead,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._waiting = waiting
        self._strategy = strategy
        self._bulk_share = bulk_share
        self._tokens_ahead = tokens_ahead
        self._timer = TickTimer(clock)

    def begin(self) -> None:
        """Start the time of a tick, unless it began at the end of the last tick."""
        self._timer.begin()

    def record_slots(self) -> None:
        """Record how many slots a tick used, for the share of bulk jobs. Call it before jobs end."""
        running = self._memory.active_slots
        self._bulk_share.record_tick(len(running), count_bulk(running), len(self._waiting.bulk))

    def record_time(self, batch: Batch, ended_s: float) -> None:
        """Report the time of a tick. The time of the next tick begins now, unless no slot is active: the worker may
        then pause.
        """
        seconds = self._timer.end(ended_s, begins_next=bool(batch and self._memory.active_slots))
        if batch:
            self._strategy.record_tick(batch, seconds)
            self._tokens_ahead.record_tick(batch, seconds)

    def record_repeated(self, batch: Batch, ended_s: float) -> None:
        """Record the slots and the time of a tick that was repeated without a plan."""
        self.record_slots()
        self.record_time(batch, ended_s)
