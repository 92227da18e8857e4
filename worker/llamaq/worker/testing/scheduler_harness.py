"""Builds a memory and a scheduler for a fake engine, and runs ticks with all integrity checks."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.outputs import Output
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache, PrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy, DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.scheduling.tokens_ahead.ngram_speculation import NgramSpeculation
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation
from llamaq.worker.testing.fake_engine import FakeEngine


class ManualClock:
    """A monotonic clock whose time changes only when a test sets `now_s`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def make_memory(
    engine: FakeEngine,
    *,
    n_slots: int = 2,
    cache: PrefixCache | None = None,
    offload: Offload | None = None,
    held_cells: int | None = None,
    similarity: float = 0.0,
    margin: int = 8,
) -> KvMemory:
    """Return slots and KV memory on the engine's sequences.

    Args:
        engine: The fake engine.
        n_slots: Number of slots.
        cache: The prefix cache. None caches nothing.
        offload: The offload tiers. None means that evicted cells are lost.
        held_cells: See `KvMemory`.
        similarity: See `SlotPool`.
        margin: See `SlotPool`.
    """
    sequences = engine.sequences
    pool = SlotPool(
        n_slots,
        sequences.n_ctx,
        sequences.n_sequences,
        similarity=similarity,
        shares_cells=sequences.kv_unified,
        margin=margin,
    )
    return KvMemory(pool, sequences, NullPrefixCache() if cache is None else cache, offload, held_cells=held_cells)


def make_scheduler(
    engine: FakeEngine,
    memory: KvMemory,
    *,
    strategy: BatchStrategy | None = None,
    chunk_size: int = 16,
    worker: str | None = None,
    bulk_share: float = 0.1,
    draft_tokens: int = 0,
    speculation: Speculation | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Return a scheduler whose ticks have at most `engine.n_batch` tokens.

    Args:
        engine: The fake engine.
        memory: The memory, see `make_memory`.
        strategy: The batch strategy. None uses `DecodeMaximal`.
        chunk_size: Upper bound on the prompt tokens of one slot in one tick.
        worker: The id of the worker, for the stats.
        bulk_share: See `Scheduler`.
        draft_tokens: Largest number of tokens in a tick that the drafters of jobs draft. 0: they draft nothing.
        speculation: Replaces the speculation of `draft_tokens`.
        clock: Returns the time in seconds.
    """
    guarded = GuardedStrategy(strategy or DecodeMaximal(), TickLimits(engine.n_batch, chunk_size))
    end_tokens = engine.vocab.end_tokens
    if draft_tokens:
        speculation = NgramSpeculation(end_tokens, draft_tokens)
    return Scheduler(
        memory,
        guarded,
        end_tokens=end_tokens,
        worker=worker,
        bulk_share=bulk_share,
        speculation=speculation,
        clock=clock,
    )


def run_tick(
    scheduler: Scheduler,
    engine: FakeEngine,
    *,
    repeats: int = 0,
    n_late: int = sys.maxsize,
    clock: Callable[[], float] = time.monotonic,
) -> list[Output]:
    """Run one tick as a worker does, and check the scheduler's integrity after each step.

    Args:
        scheduler: The scheduler.
        engine: The engine.
        repeats: How often the tick is repeated, if it can be repeated that often.
        n_late: The outputs of a repeated tick are made when this number of later ticks have been computed, and those
            of the last ones at the end. With stop strings, they are always made after one tick.
        clock: The clock of the scheduler.
    """
    scheduler.expire()
    scheduler.admit()
    scheduler.check_integrity()
    scheduler.move(0.0)
    scheduler.check_integrity()
    batch = scheduler.plan()
    results, ended_s = engine.run(batch), clock()
    outputs: list[Output] = []
    late: deque[tuple[Batch, list[SlotResult], float]] = deque()
    repeater = scheduler.repeater
    for _ in range(repeats):
        if repeater.has_stopped or (following := repeater.next_batch(results)) is None:
            break
        scheduler.check_integrity()
        late.append((batch, results, ended_s))
        batch, results, ended_s = following, engine.run(following), clock()
        if repeater.texts_may_end or len(late) >= n_late:
            outputs += repeater.late_outputs(*late.popleft()).outputs
    for earlier in late:
        outputs += repeater.late_outputs(*earlier).outputs
    outputs += scheduler.apply(batch, results).outputs
    scheduler.check_integrity()
    return outputs


def run_to_end(scheduler: Scheduler, engine: FakeEngine, max_ticks: int = 10_000) -> list[Output]:
    """Run ticks until the scheduler has no work, and return all outputs.

    Raises:
        AssertionError: The scheduler still has work after `max_ticks`.
    """
    outputs: list[Output] = []
    for _ in range(max_ticks):
        if not scheduler.has_work:
            return outputs
        outputs += run_tick(scheduler, engine)
    raise AssertionError(f"{scheduler!r} still has work after {max_ticks} ticks")
