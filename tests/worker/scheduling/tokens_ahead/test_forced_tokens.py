"""Tokens that a grammar forces need no tick of their own, and the output is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from random import Random

import pytest
from tests.support.forced_tokens_rig import PERIOD, ForcingSampler, TimedEngine, decoding_slot
from tests.support.oracle import Oracle
from tests.support.outputs import end_of, tokens_of

from llamaq.common.protocol.job_outcome import CacheTier, FinishReason
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SampledToken, SlotResult
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import Output
from llamaq.worker.core.slot import Slot
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.scheduling.strategies.batch_strategies import Balanced, BatchStrategy, DecodeMaximal, PrefillPriority
from llamaq.worker.scheduling.strategies.latency_target import LatencyTarget
from llamaq.worker.scheduling.tokens_ahead.forced_tokens import MAX_IN_TICK, ForcedTokens
from llamaq.worker.testing import (
    ByteVocab,
    FakeEngine,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    run_tick,
    run_to_end,
)

STRATEGIES: list[Callable[[], BatchStrategy]] = [DecodeMaximal, PrefillPriority, Balanced, LatencyTarget]


def run(
    jobs: Sequence[Job],
    *,
    n_ctx: int = 600,
    n_batch: int = 64,
    n_slots: int = 3,
    strategy: BatchStrategy | None = None,
    draft_tokens: int = 0,
    chunk_size: int = 16,
    repeats: int = 0,
) -> tuple[list[Output], FakeEngine]:
    """Run jobs on the fake engine, which checks every cell."""
    engine = FakeEngine(n_ctx=n_ctx, n_batch=n_batch, n_seq_max=n_slots + 4)
    memory = make_memory(engine, n_slots=n_slots, cache=RadixPrefixCache())
    scheduler = make_scheduler(engine, memory, strategy=strategy, draft_tokens=draft_tokens, chunk_size=chunk_size)
    for job in jobs:
        scheduler.submit(job)
    outputs: list[Output] = []
    while scheduler.has_work:
        outputs += run_tick(scheduler, engine, repeats=repeats)
    return outputs, engine


@pytest.mark.parametrize("seed", range(40))
def test_forced_tokens_change_no_output(seed: int) -> None:
    random = Random(seed)
    strategy = random.choice(STRATEGIES)
    n_ctx, n_batch, repeats = random.choice([120, 600]), random.choice([4, 8, 64]), random.choice([0, 50])
    draft_tokens = random.choice([0, 16])
    kinds = [
        (random.randrange(1, 40), random.randrange(1, 60), random.randrange(PERIOD + 1), random.random() < 0.3)
        for _ in range(6)
    ]

    def make(*, knows: bool) -> list[Job]:
        return [
            make_job(
                [index, *range(n_prompt)],
                max_tokens=max_tokens,
                sampler=ForcingSampler(n_free, knows=knows),
                drafting=Drafting(Oracle(), 8) if drafts else None,
            )
            for index, (n_prompt, max_tokens, n_free, drafts) in enumerate(kinds)
        ]

    plain, forced = make(knows=False), make(knows=True)
    expected, _ = run(plain, n_ctx=n_ctx, n_batch=n_batch)
    outputs, engine = run(
        forced, n_ctx=n_ctx, n_batch=n_batch, strategy=strategy(), draft_tokens=draft_tokens, repeats=repeats
    )
    for one, other in zip(plain, forced, strict=True):
        assert tokens_of(outputs, other) == tokens_of(expected, one)
        assert end_of(outputs, other).reason is end_of(expected, one).reason
        assert end_of(outputs, other).stats.generated_tokens == end_of(expected, one).stats.generated_tokens
    for batch in engine.batches:
        assert batch.n_tokens == sum(part.n_tokens for part in batch.parts) <= n_batch
        assert not any(part.forced and part.draft for part in batch.decode)


def test_forced_tokens_need_no_tick_and_no_logits() -> None:
    slow, quick = (make_job(max_tokens=90, sampler=ForcingSampler(knows=knows)) for knows in (False, True))
    _, engine = run([slow])
    n_slow = len(engine.batches)
    _, engine = run([quick], repeats=50)
    assert n_slow >= 90
    assert len(engine.batches) <= 90 * 3 / PERIOD + 12
    assert isinstance(quick.sampler, ForcingSampler)
    assert quick.sampler.n_sampled <= 90 * 4 / PERIOD + 1


@pytest.mark.parametrize("n_late", [1, 3, 1000])
@pytest.mark.parametrize("strategy", [DecodeMaximal, partial(LatencyTarget, 1000.0)], ids=["plain", "limited"])
def test_ticks_are_repeated_while_forced_tokens_do_not_pay_and_the_output_is_the_same(
    n_late: int, strategy: Callable[[], BatchStrategy]
) -> None:
    tokens, n_forced, n_plans = [], [], []
    for build_s in (0.0, 0.100):
        clock = ManualClock()
        engine = TimedEngine(clock, build_s)
        scheduler = make_scheduler(engine, make_memory(engine, n_slots=3), strategy=strategy(), clock=clock)
        jobs = [make_job([index], max_tokens=600, sampler=ForcingSampler(n_free=5)) for index in range(3)]
        for job in jobs:
            scheduler.submit(job)
        outputs: list[Output] = []
        n_plans.append(0)
        while scheduler.has_work:
            outputs += run_tick(scheduler, engine, repeats=1000, n_late=n_late, clock=clock)
            n_plans[-1] += 1
        tokens.append([tokens_of(outputs, job) for job in jobs])
        n_forced.append(sum(batch.n_forced for batch in engine.batches))
    assert tokens[0] == tokens[1]
    assert n_forced[1] < 0.2 * n_forced[0]
    assert n_plans[1] < 0.3 * n_plans[0]


def test_forced_tokens_take_the_place_of_tokens_of_a_long_prompt() -> None:
    jobs = [make_job(max_tokens=60, sampler=ForcingSampler()), make_job([7] * 100, max_tokens=1)]
    outputs, engine = run(jobs, chunk_size=16)
    beside_prompt = [batch for batch in engine.batches if batch.decode and batch.prefill]
    assert any(batch.n_forced for batch in beside_prompt[:-1])
    assert {batch.n_tokens for batch in beside_prompt[:-1]} == {16}, "one pass over the weights for each chunk"
    assert beside_prompt[-1].n_tokens <= 16
    assert tokens_of(outputs, jobs[0]) == tokens_of(run([make_job(max_tokens=60, sampler=ForcingSampler())])[0])


def test_forced_tokens_do_not_delay_the_first_token_of_a_prompt_that_ends_in_the_tick() -> None:
    streaming, ending = make_job(max_tokens=60, sampler=ForcingSampler(0)), make_job([7] * 31, max_tokens=1)
    _, engine = run([streaming, ending], chunk_size=16)
    beside_prompt = [(batch.n_forced, batch.n_prefill) for batch in engine.batches if batch.decode and batch.prefill]
    assert beside_prompt == [(0, 15)]


def test_forced_tokens_beside_a_prompt_always_pay() -> None:
    forced = ForcedTokens(can_remove=True, is_limited=False)
    slot = decoding_slot(make_job(max_tokens=300, sampler=ForcingSampler(n_free=0)))
    batch = Batch((DecodeToken(slot),))
    for seconds in [0.010] * 8 + [0.910, 0.910] * 3:
        forced.record_tick(forced.add(batch, 64, inf) if seconds > 0.010 else batch, seconds)
    assert not forced.add(batch, 64, inf).n_forced
    assert forced.add(replace(batch, prefill=(PrefillChunk(Slot(1), 4),)), 64, inf).n_forced


def test_the_forced_tokens_of_all_slots_pay_together_or_not_at_all() -> None:
    forced = ForcedTokens(can_remove=True, is_limited=False)
    slots = [decoding_slot(make_job(max_tokens=300, sampler=ForcingSampler(n_free=n_free))) for n_free in (0, 8)]
    batch = Batch(tuple(map(DecodeToken, slots)))
    with_forced = forced.add(batch, 64, inf)
    n_each = [len(part.forced) for part in with_forced.decode]
    assert n_each[0] > 0
    runs = [slot.active for slot in slots]
    for is_worthwhile in (True, False):
        for _ in range(12):
            forced.record_tick(batch, 0.010)
        for _ in range(7):
            forced.record_tick(with_forced, 0.011 if is_worthwhile else 0.400)
            forced.record_tick(batch, 0.010)
        assert forced.add(batch, 64, inf) == (with_forced if is_worthwhile else batch)
        assert forced.adds_after(runs) is is_worthwhile


@pytest.mark.parametrize("is_limited", [False, True])
def test_ticks_without_a_grammar_tell_nothing_about_the_gain(is_limited: bool) -> None:
    forced = ForcedTokens(can_remove=True, is_limited=is_limited)
    batch = Batch((DecodeToken(decoding_slot(make_job(max_tokens=300))),))
    before = repr(forced._gain)
    for _ in range(20):
        forced.record_tick(batch, 0.010, has_grammar=False)
    assert repr(forced._gain) == before
    assert ("1: 10.0 ms" in repr(forced)) is is_limited


def test_forced_tokens_end_no_repetition_if_the_batch_has_no_room_for_them() -> None:
    n_plans = []
    for knows in (False, True):
        engine = FakeEngine(n_batch=2, n_seq_max=8)
        scheduler = make_scheduler(engine, make_memory(engine))
        for index in range(2):
            scheduler.submit(make_job([index], max_tokens=100, sampler=ForcingSampler(knows=knows)))
        n_plans.append(0)
        while scheduler.has_work:
            run_tick(scheduler, engine, repeats=50)
            n_plans[-1] += 1
    assert n_plans[1] == n_plans[0] < 10


@pytest.mark.parametrize("stop", [["a stop string"], []])
def test_forced_tokens_end_no_repetition_if_they_may_not_be_added(stop: list[str]) -> None:
    n_plans = []
    for knows in (False, True):
        engine = FakeEngine(n_ctx=600, n_seq_max=8, can_cut=False)
        scheduler = make_scheduler(engine, make_memory(engine))
        job = make_job([1, 2], max_tokens=100, stop=stop, sampler=ForcingSampler(knows=knows))
        scheduler.submit(job)
        n_plans.append(0)
        while scheduler.has_work:
            run_tick(scheduler, engine, repeats=50)
            n_plans[-1] += 1
    assert (n_plans[1] == n_plans[0]) is bool(stop)


def test_a_stop_string_within_forced_tokens_ends_the_job_and_leaves_no_cell_after_it() -> None:
    job = make_job([1, 2], max_tokens=50, sampler=ForcingSampler())
    job.detokenizer = StreamDetokenizer(ByteVocab().piece, ["FG"])
    again = make_job([1, 2], max_tokens=20, sampler=ForcingSampler())
    outputs, _ = run([job])
    end = end_of(outputs, job)
    assert end.reason is FinishReason.STOP
    assert end.stats.generated_tokens == 7
    outputs, _ = run([job_like(job), again], n_slots=1)
    assert len(tokens_of(outputs, again)) == 20


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_job_that_ends_within_forced_tokens_leaves_its_cells_to_the_next_job(can_cut: bool) -> None:
    job = job_like(make_job([1, 2]))
    engine = FakeEngine(n_ctx=600, n_seq_max=8, can_cut=can_cut)
    memory = make_memory(engine, n_slots=1, cache=RadixPrefixCache(can_cut=can_cut))
    scheduler = make_scheduler(engine, memory)
    scheduler.submit(job)
    outputs = run_to_end(scheduler, engine)
    assert end_of(outputs, job).reason is FinishReason.STOP
    history = [*job.prompt, *tokens_of(outputs, job)]
    again, following = job_like(make_job([1, 2])), make_job([*history, 3])
    for next_job, n_cached in ((again, 1), (following, len(history) - 1)):
        scheduler.submit(next_job)
        stats = end_of(run_to_end(scheduler, engine), next_job).stats
        assert stats.prefix_cache_tokens >= n_cached
        assert stats.prefix_cache_tier is CacheTier.DEVICE


def job_like(job: Job) -> Job:
    copy = make_job(job.prompt, max_tokens=50, sampler=ForcingSampler())
    copy.detokenizer = StreamDetokenizer(ByteVocab().piece, ["FG"])
    return copy


def test_the_last_token_of_a_job_is_sampled() -> None:
    for max_tokens in range(1, 2 * PERIOD):
        job = make_job(max_tokens=max_tokens, sampler=ForcingSampler())
        outputs, _ = run([job])
        assert len(tokens_of(outputs, job)) == max_tokens
        assert end_of(outputs, job).reason is FinishReason.LENGTH


def test_one_tick_has_a_bounded_number_of_forced_tokens() -> None:
    class Endless(ForcingSampler):
        def forced_tokens(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
            return [65] * 1000

        def sample(self, *_: object) -> int:
            return 65

    jobs = [make_job([index], max_tokens=300, sampler=Endless()) for index in range(3)]
    _, engine = run(jobs, n_ctx=2000, n_batch=512)
    assert max(batch.n_forced for batch in engine.batches) == MAX_IN_TICK
    assert max(batch.n_decode for batch in engine.batches) == 3


def test_the_engine_returns_forced_tokens_and_then_the_error_of_the_draw() -> None:
    job = make_job([1, 2], max_tokens=50, sampler=ForcingSampler(n_free=PERIOD))
    slot = decoding_slot(job)
    engine = FakeEngine(n_ctx=600, n_seq_max=4)
    engine.sequences.append(slot.active.seq_id, slot.active.tokens[: slot.active.n_past])
    job.sampler.fails_at = 4  # type: ignore[attr-defined]
    [result] = engine.run(Batch((DecodeToken(slot, forced=(7, 8, 9)),)))
    assert isinstance(result, SlotResult)
    assert result.sampled == tuple(map(SampledToken, (7, 8, 9)))
    assert result.error is not None
    assert result.n_past == slot.active.n_past + 4
