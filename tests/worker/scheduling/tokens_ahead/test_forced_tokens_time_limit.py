"""A strategy that limits the time of ticks limits forced tokens too."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.forced_tokens_rig import ForcingSampler, TimedEngine, decoding_slot
from tests.support.oracle import Oracle

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.latency_target import LatencyTarget
from llamaq.worker.scheduling.tokens_ahead.forced_tokens import FIRST_TOKENS, ForcedTokens
from llamaq.worker.testing import (
    FakeEngine,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    run_tick,
)


def test_a_limit_of_the_time_of_ticks_bounds_forced_tokens() -> None:
    forced = ForcedTokens(can_remove=True, is_limited=True)
    job = make_job(max_tokens=300, sampler=ForcingSampler(n_free=0))
    slot = decoding_slot(job)
    batch = Batch((DecodeToken(slot),))
    room, limit_s = 64, 0.010
    assert not forced.add(batch, room, limit_s).n_forced  # this tick measures the time without them
    forced.record_tick(batch, 0.004)
    first = forced.add(batch, room, limit_s)
    assert first.n_forced == FIRST_TOKENS
    forced.record_tick(first, 0.004 + FIRST_TOKENS * 0.001)
    assert forced.add(batch, room, limit_s).n_forced == 6
    assert forced.add(batch, room, 0.003).n_forced == 0
    assert forced.add(batch, room, float("inf")).n_forced > 6


def test_forced_tokens_end_no_repetition_if_the_limit_of_the_time_of_ticks_allows_none() -> None:
    n_plans = []
    for knows in (False, True):
        clock = ManualClock()
        engine = TimedEngine(clock, build_s=0.0)
        scheduler = make_scheduler(engine, make_memory(engine), strategy=LatencyTarget(5.0), clock=clock)
        scheduler.submit(make_job(max_tokens=100, sampler=ForcingSampler(knows=knows)))
        n_plans.append(0)
        while scheduler.has_work:
            run_tick(scheduler, engine, repeats=50, n_late=1, clock=clock)
            n_plans[-1] += 1
        assert not any(batch.n_forced for batch in engine.batches)
    assert n_plans[1] <= n_plans[0] + 1 < 10  # with one more plan, the time of a tick becomes known


def test_forced_tokens_end_a_repetition_if_a_plan_with_the_same_limit_would_add_them() -> None:
    forced = ForcedTokens(can_remove=True, is_limited=True)
    slot = decoding_slot(make_job(max_tokens=300, sampler=ForcingSampler(n_free=0)))
    batch = Batch((DecodeToken(slot),))
    assert not forced.add(batch, 64, 0.010).n_forced
    assert forced.adds_after([slot.active])  # the tick of this plan tells the time without forced tokens
    forced.record_tick(batch, 0.004)
    for limit_s in (0.010, 0.003, 0.010):
        n_forced = forced.add(batch, 64, limit_s).n_forced
        assert forced.adds_after([slot.active]) is (n_forced > 0) is (limit_s > 0.004)


def test_ticks_before_the_first_grammar_tell_the_time_without_forced_tokens() -> None:
    forced = ForcedTokens(can_remove=True, is_limited=True)
    batch = Batch((DecodeToken(decoding_slot(make_job(max_tokens=300, sampler=ForcingSampler(n_free=0)))),))
    forced.record_tick(batch, 0.004)
    assert forced.add(batch, 64, 0.010).n_forced == FIRST_TOKENS


def test_forced_tokens_and_drafts_together_keep_the_limit_of_the_time_of_ticks() -> None:
    class Limited(DecodeMaximal):
        def draft_limit_s(self, slots: Sequence[Slot]) -> float:
            return 0.0205

    clock, engine = ManualClock(), FakeEngine(n_ctx=2000, n_batch=64, n_seq_max=8)
    memory = make_memory(engine, n_slots=2)
    scheduler = make_scheduler(engine, memory, strategy=Limited(), draft_tokens=64, clock=clock)
    scheduler.submit(make_job([1, 2], max_tokens=300, sampler=ForcingSampler(n_free=4)))
    scheduler.submit(make_job([3, 4], max_tokens=300, drafting=Drafting(Oracle(), 20)))
    seconds: list[float] = []
    while scheduler.has_work:
        scheduler.admit()
        batch = scheduler.plan()
        seconds.append(0.010 + 0.001 * (batch.n_forced + batch.n_drafted))
        clock.now_s += seconds[-1]
        scheduler.apply(batch, engine.run(batch))
    assert any(batch.n_forced and batch.n_drafted for batch in engine.batches)
    assert max(seconds) < 0.0205
