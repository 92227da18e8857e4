"""Speculation on the fake engine, which checks every cell: the output does not change, and the accounts stay exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from tests.support.oracle import NextToken, Oracle
from tests.support.outputs import end_of, tokens_of

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.batch import Batch
from llamaq.worker.core.draft import NO_DRAFT, Draft, Drafting
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, Output
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy, DecodeMaximal
from llamaq.worker.scheduling.strategies.latency_target import LatencyTarget
from llamaq.worker.scheduling.tokens_ahead.ngram_speculation import FIRST_TRIAL_AFTER, GROWTH, TRIAL_TOKENS
from llamaq.worker.scheduling.tokens_ahead.speculation import TRIAL_AFTER
from llamaq.worker.testing import (
    ByteVocab,
    FakeEngine,
    GreedySampler,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    next_letter,
    run_tick,
)

EOS = ByteVocab.eos


def next_of_length(history: Sequence[int]) -> int:
    """Return a letter that depends on the length of the history only, which takes less time than `next_letter`."""
    return ord("a") + len(history) % 26


class Rig:
    def __init__(
        self,
        *,
        n_slots: int = 2,
        n_ctx: int = 400,
        n_batch: int = 32,
        next_token: NextToken = next_letter,
        strategy: BatchStrategy | None = None,
        tick_s: Callable[[Batch], float] = lambda _: 0.0,
    ) -> None:
        self.engine = FakeEngine(n_ctx=n_ctx, n_batch=n_batch, n_seq_max=n_slots + 4, next_token=next_token)
        self.memory = make_memory(self.engine, n_slots=n_slots, cache=RadixPrefixCache())
        self.clock = ManualClock()
        self.scheduler = make_scheduler(
            self.engine, self.memory, strategy=strategy, draft_tokens=32, chunk_size=16, clock=self.clock
        )
        run = self.engine.run

        def run_for_some_time(batch: Batch) -> object:
            self.clock.now_s += tick_s(batch)
            return run(batch)

        self.engine.run = run_for_some_time  # type: ignore[method-assign, assignment]

    def run(self, *jobs: Job) -> list[Output]:
        for job in jobs:
            self.scheduler.submit(job)
        outputs = []
        while self.scheduler.has_work:
            outputs += run_tick(self.scheduler, self.engine)
        return outputs

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of all batches."""
        return [part.draft for batch in self.engine.batches for part in batch.decode if part.draft is not NO_DRAFT]


class EverySecondTick(Oracle):
    """Drafts one token for every second tick."""

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        return NO_DRAFT if len(history) % 3 else super().propose(history, 1)


def drafting(oracle: Oracle, n_max: int = 8) -> Drafting:
    return Drafting(oracle, n_max)


def test_accepted_tokens_come_in_fewer_ticks_and_are_those_of_a_job_without_drafts() -> None:
    plain, rig = Rig(), Rig()
    expected = plain.run(make_job(max_tokens=60))
    outputs = rig.run(make_job(max_tokens=60, drafting=drafting(Oracle())))
    assert tokens_of(outputs) == tokens_of(expected)
    assert len(rig.engine.batches) < len(plain.engine.batches) / 5
    stats = end_of(outputs).stats
    assert stats.drafted_tokens == stats.accepted_tokens == sum(map(len, rig.drafts))
    assert stats.generated_tokens == 60
    assert rig.engine.computed == plain.engine.computed, "the last token is computed by neither"


@pytest.mark.parametrize("wrong_at", range(4))
def test_a_wrong_token_ends_its_draft_and_its_cells_are_removed(wrong_at: int) -> None:
    rig = Rig()
    outputs = rig.run(make_job(max_tokens=40, drafting=drafting(Oracle(wrong_at=wrong_at))))
    assert tokens_of(outputs) == tokens_of(Rig().run(make_job(max_tokens=40)))
    stats = end_of(outputs).stats
    assert stats.accepted_tokens <= wrong_at * len(rig.drafts)
    assert stats.drafted_tokens == sum(map(len, rig.drafts)) > stats.accepted_tokens


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_draft_never_exceeds_max_tokens(max_tokens: int) -> None:
    rig = Rig()
    outputs = rig.run(make_job(max_tokens=max_tokens, drafting=drafting(Oracle(), 5)))
    assert len(tokens_of(outputs)) == max_tokens
    assert end_of(outputs).reason is FinishReason.LENGTH
    assert max(map(len, rig.engine.sequences.memory.values())) == 6 + max_tokens - 1


@pytest.mark.parametrize("end", [EOS, ord("#")])
def test_an_end_token_or_stop_token_ends_the_job_in_the_middle_of_a_draft(end: int) -> None:
    tokens = [*b"some words", end, *b"more words"]
    model: NextToken = lambda history: tokens[len(history) - 6]  # noqa: E731
    rig = Rig(next_token=model)
    outputs = rig.run(make_job("Hello", max_tokens=50, stop_token_ids=[35], drafting=drafting(Oracle(model))))
    assert bytes(tokens_of(outputs)) == b"some words"
    assert end_of(outputs).reason is FinishReason.STOP
    assert all(end not in draft.tokens for draft in rig.drafts)


def test_a_stop_string_in_the_middle_of_a_draft_ends_the_job_and_the_cache_has_accepted_tokens_only() -> None:
    tokens = [*b"some of the words and more"]
    model: NextToken = lambda history: tokens[(len(history) - 6) % len(tokens)]  # noqa: E731
    rig = Rig(next_token=model)
    outputs = rig.run(make_job("Hello", max_tokens=50, stop=["ds"], drafting=drafting(Oracle(model), 16)))
    end = end_of(outputs)
    assert bytes(tokens_of(outputs)) == b"some of the words"
    assert (end.reason, end.stats.stop_string, end.stats.generated_tokens) == (FinishReason.STOP, "ds", 17)
    assert end.stats.drafted_tokens > end.stats.accepted_tokens
    (cached,) = rig.engine.sequences.memory.values()
    assert cached == [*ByteVocab().encode("Hello"), *b"some of the words"]
    again = rig.run(make_job([*cached, 1], max_tokens=2))
    assert end_of(again).stats.prefix_cache_tokens == len(cached)


def test_an_error_of_the_sampler_comes_after_the_tokens_before_it() -> None:
    outputs = Rig().run(make_job(max_tokens=40, sampler=GreedySampler(fails_at=7), drafting=drafting(Oracle())))
    assert tokens_of(outputs) == tokens_of(Rig().run(make_job(max_tokens=7)))
    error = end_of(outputs).error
    assert error is not None
    assert error.code is ErrorCode.GRAMMAR_EXHAUSTED


def test_drafts_use_only_the_room_that_the_batch_and_the_cells_have() -> None:
    rig = Rig(n_ctx=48, n_batch=12)
    jobs = [make_job([at] * 10, max_tokens=60, drafting=drafting(Oracle(), 16)) for at in range(2)]
    outputs = rig.run(*jobs)  # the fake engine raises an error when a batch needs more cells or tokens
    assert rig.scheduler.cache_snapshot().preemptions > 0
    for job in jobs:
        alone = Rig().run(make_job(job.prompt, max_tokens=48 - 10))
        assert tokens_of([output for output in outputs if output.job is job]) == tokens_of(alone)


def test_a_batch_that_was_refused_says_nothing_about_its_drafts() -> None:
    rig = Rig()
    rig.engine.refuse()
    job = make_job(max_tokens=20, drafting=drafting(Oracle()))
    outputs = rig.run(job, make_job("other", max_tokens=20))
    stats = next(output.stats for output in outputs if isinstance(output, JobEnded) and output.job is job)
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_the_accepted_tokens_of_a_tick_are_counted() -> None:
    rig = Rig()
    rig.scheduler.submit(make_job(max_tokens=40, drafting=drafting(Oracle(wrong_at=3))))
    n_generated = 0
    while rig.scheduler.has_work:
        rig.scheduler.admit()
        batch = rig.scheduler.plan()
        outputs, n_accepted = rig.scheduler.apply(batch, rig.engine.run(batch))
        if batch.n_decode:
            n_generated += batch.n_decode + n_accepted
            assert len(tokens_of(outputs)) == 1 + n_accepted
            assert batch.n_tokens == 1 + batch.n_drafted
    assert n_generated == 39, "the first of 40 tokens comes from the prompt"


def test_where_nothing_is_accepted_drafts_end_soon_and_retries_are_rare() -> None:
    rig = Rig(n_ctx=2000, next_token=next_of_length, tick_s=lambda batch: 0.6 + 0.4 * batch.n_tokens)
    rig.run(make_job(max_tokens=1000, drafting=drafting(Oracle(next_of_length, wrong_at=0))))
    assert len(rig.drafts) < 10 + 1000 / TRIAL_AFTER
    assert rig.clock.now_s - 1000 < 1.02 * 1000
    rig.engine.batches.clear()
    rig.run(make_job("next", max_tokens=100, drafting=drafting(Oracle(next_of_length, wrong_at=0))))
    assert len(rig.drafts) <= 4, "the next job begins with the experience of this one"


def test_drafts_that_promise_nothing_yet_are_tried_soon_and_then_in_growing_intervals() -> None:
    def tick_s(batch: Batch) -> float:
        return 0.55 + 0.45 * batch.n_tokens  # only drafts that are mostly accepted gain

    rig = Rig(n_ctx=2000, next_token=next_of_length, tick_s=tick_s)
    rig.run(make_job(max_tokens=100, drafting=drafting(Oracle(next_of_length))))
    assert len(rig.drafts[0]) > 0
    assert sum(map(len, rig.drafts)) > 60
    hopeless = Rig(n_ctx=2000, next_token=next_of_length, tick_s=tick_s)
    hopeless.run(make_job(max_tokens=1000, drafting=drafting(Oracle(next_of_length, wrong_at=0))))
    decoding = [batch for batch in hopeless.engine.batches if batch.decode]
    drafted = [index for index, batch in enumerate(decoding) if batch.n_drafted]
    gaps = [later - earlier for earlier, later in pairwise(drafted[1:])]  # the first draft measures the time of a token
    assert gaps == sorted(gaps)
    assert gaps[0] < 4 * FIRST_TRIAL_AFTER
    assert gaps[-1] == TRIAL_AFTER


def test_trials_of_several_jobs_delay_few_ticks_while_no_draft_promises_a_gain() -> None:
    n_jobs = 8
    rig = Rig(n_slots=n_jobs, n_ctx=2000, tick_s=lambda batch: 0.01 * batch.n_decode + 0.008 * batch.n_drafted)
    rig.run(*(make_job(f"Hello {name}", max_tokens=200, drafting=drafting(Oracle(wrong_at=0))) for name in "abcdefgh"))
    ticks = [
        number for number, batch in enumerate(rig.engine.batches) if batch.n_drafts and len(batch.decode) == n_jobs
    ]
    trials = ticks[2:]  # the first ones measure the times of drafts
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert n_jobs <= gaps[0] < 3 * n_jobs
    assert gaps == sorted(set(gaps))
    assert len(gaps) >= 4


def test_the_first_draft_of_a_job_is_short_although_those_of_other_jobs_were_accepted() -> None:
    rig = Rig(n_ctx=2000, next_token=next_of_length, tick_s=lambda batch: 0.6 + 0.4 * batch.n_tokens)
    rig.run(make_job(max_tokens=200, drafting=drafting(Oracle(next_of_length))))
    assert max(map(len, rig.drafts)) == 8
    rig.engine.batches.clear()
    rig.run(make_job("next", max_tokens=100, drafting=drafting(Oracle(next_of_length, wrong_at=0))))
    assert [len(draft) for draft in rig.drafts[:2]] == [TRIAL_TOKENS] * 2
    assert len(rig.drafts) <= 1 + 3, "the first one, and retries after 16, 32 and 64 ticks"
    rig.engine.batches.clear()
    rig.run(make_job("last", max_tokens=100, drafting=drafting(Oracle(next_of_length))))
    assert len(rig.drafts[0]) == TRIAL_TOKENS
    decoding = [batch for batch in rig.engine.batches if batch.decode]
    assert decoding[0].n_drafted, "at once, although the drafts of the job before were not accepted"
    assert len(decoding) < 100 / 3


def test_drafts_grow_with_the_evidence_that_they_are_accepted() -> None:
    rig = Rig(n_ctx=2000, n_batch=64, next_token=next_of_length, tick_s=lambda batch: 0.9 + 0.1 * batch.n_tokens)
    rig.run(make_job(max_tokens=300, drafting=drafting(Oracle(next_of_length), 32)))
    assert max(map(len, rig.drafts)) == 32
    rig.engine.batches.clear()
    rig.run(make_job("next", max_tokens=300, drafting=drafting(Oracle(next_of_length), 32)))
    assert [len(draft) for draft in rig.drafts[:4]] == [1, GROWTH, GROWTH**2, 32]
    rig.engine.batches.clear()
    rig.run(make_job("last", max_tokens=300, drafting=drafting(Oracle(next_of_length, wrong_at=5), 32)))
    assert [len(draft) for draft in rig.drafts[:5]] == [1, GROWTH, GROWTH**2, GROWTH**2 // 2, 5]


def test_a_tick_after_a_draft_that_takes_longer_is_a_cost_of_the_draft() -> None:
    """On a GPU, llama.cpp builds its graph again, because the batch has fewer tokens than the one before."""
    was_draft = False

    def tick_s(batch: Batch) -> float:
        nonlocal was_draft
        is_after, was_draft = was_draft and not batch.n_drafted, batch.n_drafted > 0
        return 1.0 + 0.1 * batch.n_drafted + (2.0 if is_after else 0.0)

    rig = Rig(n_ctx=4000, next_token=next_of_length, tick_s=tick_s)
    rig.run(make_job(max_tokens=1000, drafting=drafting(EverySecondTick(next_of_length))))
    assert rig.clock.now_s - 1000 < 1000 * 1.05
    assert len(rig.drafts) < 20


def test_times_that_were_measured_beside_more_jobs_do_not_end_the_drafts_of_one_job() -> None:
    def tick_s(batch: Batch) -> float:
        return 0.9 + 0.1 * batch.n_decode + (0.2 if batch.n_decode == 1 else 2.0) * batch.n_drafted

    rig = Rig(n_slots=4, n_ctx=2000, next_token=next_of_length, tick_s=tick_s)
    rig.run(*[make_job(max_tokens=100, drafting=drafting(Oracle(next_of_length))) for _ in range(4)])
    assert len(rig.drafts) < 12
    rig.engine.batches.clear()
    rig.run(make_job("alone", max_tokens=100, drafting=drafting(Oracle(next_of_length))))
    assert len([batch for batch in rig.engine.batches if batch.decode]) < 100 / 3


def test_a_first_draft_that_takes_long_does_not_end_the_drafts() -> None:
    n_drafted = 0

    def tick_s(batch: Batch) -> float:
        nonlocal n_drafted
        n_drafted += bool(batch.n_drafted)
        is_first = n_drafted == 1 and batch.n_drafted > 0
        return 0.6 + 0.4 * batch.n_tokens + 20 * is_first  # llama.cpp prepares memory for such batches

    rig = Rig(n_ctx=2000, next_token=next_of_length, tick_s=tick_s)
    rig.run(make_job(max_tokens=100, drafting=drafting(Oracle(next_of_length))))
    assert len(rig.engine.batches) < 100 / 3


def test_a_slow_first_draft_beside_as_many_jobs_does_not_end_the_drafts() -> None:
    slow = [20.0]

    def tick_s(batch: Batch) -> float:
        is_slow = slow and batch.n_decode == 1 and batch.n_drafted
        return 0.6 + 0.4 * batch.n_tokens + (slow.pop() if is_slow else 0)

    def drafting_job(text: str, max_tokens: int) -> Job:
        return make_job(text, max_tokens=max_tokens, drafting=drafting(Oracle(next_of_length)))

    rig = Rig(n_slots=2, n_ctx=2000, next_token=next_of_length, tick_s=tick_s)
    rig.run(drafting_job("one", 100), make_job("two", max_tokens=20), make_job("three", max_tokens=200))
    rig.engine.batches.clear()
    rig.run(drafting_job("alone", 200))
    assert not slow
    assert len([batch for batch in rig.engine.batches if batch.decode]) < 200 / 2


def test_a_text_that_begins_to_repeat_gets_long_drafts_again() -> None:
    rig = Rig(n_ctx=2000, next_token=next_of_length, tick_s=lambda batch: 0.6 + 0.4 * batch.n_tokens)
    rig.run(make_job(max_tokens=500, drafting=drafting(Oracle(next_of_length, wrong_at=0))))
    started_s = rig.clock.now_s
    rig.run(make_job("next", max_tokens=500, drafting=drafting(Oracle(next_of_length))))
    assert rig.clock.now_s - started_s < 500 / 1.5


def test_drafts_of_several_jobs_share_one_batch() -> None:
    rig = Rig(n_slots=3)
    jobs = [make_job(text, max_tokens=30, drafting=drafting(Oracle(), 4)) for text in ("one", "two", "six")]
    outputs = rig.run(*jobs, make_job("zero", max_tokens=30))
    assert any(sum(len(part.draft) > 0 for part in batch.decode) == 3 for batch in rig.engine.batches)
    for job in jobs:
        expected = tokens_of(Rig().run(make_job(job.prompt, max_tokens=30)))
        assert tokens_of([output for output in outputs if output.job is job]) == expected


def test_a_latency_target_bounds_ticks_with_drafts_and_allows_none_while_prompts_are_computed() -> None:
    def tick_s(batch: Batch) -> float:
        return 0.040 + 0.005 * batch.n_tokens  # twelve tokens take as long as the target

    rig = Rig(n_ctx=4000, strategy=LatencyTarget(100), tick_s=tick_s, n_batch=64)
    rig.scheduler.submit(make_job(max_tokens=400, drafting=drafting(Oracle(), 32)))
    for _ in range(30):
        run_tick(rig.scheduler, rig.engine)
    alone = [batch.n_tokens for batch in rig.engine.batches if not batch.n_prefill]
    rig.engine.batches.clear()
    rig.scheduler.submit(make_job([7] * 200, max_tokens=1))
    for _ in range(10):
        run_tick(rig.scheduler, rig.engine)
    assert 1 < max(alone[3:]) <= 12
    prefilling = [batch for batch in rig.engine.batches if batch.n_prefill]
    assert prefilling
    assert all(batch.n_drafted == 0 for batch in prefilling)


def test_drafts_beside_a_prompt_need_no_further_pass_over_the_weights() -> None:
    rig = Rig(n_ctx=4000, n_batch=64)
    rig.scheduler.submit(make_job(max_tokens=400, drafting=drafting(Oracle(), 8)))
    for _ in range(10):
        run_tick(rig.scheduler, rig.engine)
    rig.engine.batches.clear()
    rig.scheduler.submit(make_job([7] * 35, max_tokens=1))
    for _ in range(3):
        run_tick(rig.scheduler, rig.engine)
    assert [(batch.n_prefill, batch.n_drafted) for batch in rig.engine.batches] == [(15, 0), (15, 0), (5, 8)]


def test_a_strategy_of_a_user_gets_drafts_without_knowing_them() -> None:
    class Custom:
        def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
            return DecodeMaximal().build_batch(slots, budget, chunk_size, queue_depth=queue_depth)

    rig = Rig(strategy=Custom())
    rig.run(make_job(max_tokens=40, drafting=drafting(Oracle())))
    assert rig.drafts
    assert not rig.scheduler._strategy.faults
