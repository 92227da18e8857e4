"""A tick is repeated without a plan only while the next plan would be the same, and its tokens are as with plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.support.oracle import Oracle
from tests.support.outputs import end_of, first_tokens, tokens_of

from llamaq.common.errors import EngineError, ErrorCode
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.batch import Batch, DecodeToken, SlotResult
from llamaq.worker.core.draft import Draft, Drafting
from llamaq.worker.core.draft_plan import DraftWork
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, Output
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.scheduling.preemption import CELLS_AHEAD
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy, DecodeMaximal
from llamaq.worker.scheduling.strategies.tick_times import TickTime
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.scheduling.tokens_ahead.speculation import MAX_UNSEARCHED, SEARCHES_PER_TICK, Speculation
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
    run_to_end,
)

MANY = 1000
PROMPT = make_job().prompt
END_AT = 12


class Rig:
    """A scheduler whose ticks are repeated as often as possible."""

    def __init__(
        self,
        *jobs: Job,
        n_ctx: int = 4096,
        n_slots: int = 2,
        margin: int = 8,
        caches: bool = False,
        strategy: BatchStrategy | None = None,
        draft_tokens: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.engine = FakeEngine(n_ctx=n_ctx, n_seq_max=n_slots + 4, next_token=letter_then_end)
        offload = BlockTransfers(BlockStore(16, 10**7, can_cut=True), self.engine.sequences) if caches else None
        self.memory = make_memory(
            self.engine,
            n_slots=n_slots,
            margin=margin,
            cache=RadixPrefixCache() if caches else NullPrefixCache(),
            offload=offload,
        )
        self.scheduler = make_scheduler(
            self.engine,
            self.memory,
            strategy=strategy,
            draft_tokens=draft_tokens,
            speculation=speculation,
            clock=self.clock,
        )
        self.outputs: list[Output] = []
        for job in jobs:
            self.scheduler.submit(job)

    def tick(self, repeats: int = MANY, n_late: int = MANY) -> int:
        """Run a tick, and return how often it was repeated."""
        n_before = len(self.engine.batches)
        self.outputs += run_tick(self.scheduler, self.engine, repeats=repeats, n_late=n_late, clock=self.clock)
        return len(self.engine.batches) - n_before - 1

    def prefill(self) -> None:
        """Run the tick that computes the prompts."""
        assert self.tick() == 0

    def tokens(self, job: Job) -> list[int]:
        return tokens_of(self.outputs, job)

    def end(self, job: Job) -> JobEnded:
        return end_of(self.outputs, job)


def letter_then_end(history: Sequence[int]) -> int:
    """Return letters, and an end token for a prompt that begins with 0 after `END_AT` tokens."""
    return ByteVocab.eos if history[0] == 0 and len(history) == END_AT + 1 else next_letter(history)


def letters(n_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Return the first tokens after the prompt of `make_job`."""
    return first_tokens(prompt, n_tokens)


def test_a_tick_is_repeated_until_the_next_token_ends_a_job() -> None:
    long, short = make_job(max_tokens=40), make_job(max_tokens=10)
    rig = Rig(long, short)
    rig.prefill()
    assert rig.tick() == 8
    assert rig.end(short).reason is FinishReason.LENGTH
    assert rig.tick() == 29
    assert rig.end(long).stats.generated_tokens == 40
    assert rig.tokens(long) == letters(40)
    assert rig.tokens(short) == letters(10)
    assert not rig.engine.sequences.memory


def test_an_end_token_ends_the_repetition() -> None:
    job, other = make_job([0], max_tokens=40), make_job(max_tokens=40)
    rig = Rig(job, other)
    rig.prefill()
    assert rig.tick() == END_AT - 1
    assert rig.end(job).reason is FinishReason.STOP
    assert rig.tokens(job) == letters(END_AT, [0])


def test_a_stop_token_of_a_job_ends_the_repetition() -> None:
    n_tokens, stop = next((n, token) for n, token in enumerate(letters(40)) if n > 2 and token not in letters(n))
    job, other = make_job(max_tokens=40, stop_token_ids=[stop]), make_job(max_tokens=40)
    rig = Rig(job, other)
    rig.prefill()
    assert rig.tick() == n_tokens - 1
    assert rig.end(job).reason is FinishReason.STOP
    assert rig.tokens(job) == letters(n_tokens)
    rig.tick()
    assert rig.tokens(other) == letters(40)


def test_an_error_of_one_job_ends_the_repetition() -> None:
    faulty, other = make_job(max_tokens=40, sampler=GreedySampler(fails_at=6)), make_job(max_tokens=40)
    rig = Rig(faulty, other)
    rig.prefill()
    assert rig.tick() == 5
    error = rig.end(faulty).error
    assert error is not None
    assert error.code is ErrorCode.GRAMMAR_EXHAUSTED
    assert rig.tick() == 32
    assert rig.tokens(other) == letters(40)


def test_lost_cells_end_the_repetition() -> None:
    job = make_job(max_tokens=20)
    rig = Rig(job)
    rig.prefill()
    assert rig.tick(repeats=3) == 3
    rig.engine.lose_cells(job.id, 2)
    assert rig.tick() == 0
    run_all(rig)
    assert rig.tokens(job) == letters(20)


def run_all(rig: Rig) -> None:
    """Run ticks with plans until no job is left."""
    rig.outputs += run_to_end(rig.scheduler, rig.engine)


def test_a_tick_with_a_prompt_is_not_repeated() -> None:
    rig = Rig(make_job(max_tokens=90))
    rig.prefill()
    rig.scheduler.submit(make_job("x" * 40, max_tokens=1))
    assert [rig.tick() for _ in range(3)] == [0, 0, 0], "the prompt has three chunks"
    assert rig.tick() > 0


@pytest.mark.parametrize(("n_repeats", "n_ticks"), [(0, 9), (30, 10)])
def test_a_stop_string_ends_a_job_one_tick_late_and_the_late_token_is_not_used(n_repeats: int, n_ticks: int) -> None:
    stop = bytes(letters(9)[7:]).decode()
    stopped, other = make_job(max_tokens=40, stop=[stop]), make_job(max_tokens=40)
    rig = Rig(stopped, other, caches=True)
    rig.prefill()
    while not any(isinstance(out, JobEnded) for out in rig.outputs):
        rig.tick(n_repeats)
    assert rig.tokens(stopped) == letters(9)
    assert rig.end(stopped).reason is FinishReason.STOP
    assert rig.end(stopped).stats.generated_tokens == 9
    assert len(rig.engine.batches) == n_ticks
    assert cached_tokens(rig) == [[*PROMPT, *letters(n_ticks - 1)]]
    run_all(rig)
    assert rig.tokens(other) == letters(40)


def cached_tokens(rig: Rig) -> list[list[int]]:
    """Return the tokens of the sequences that no job runs in."""
    running = {slot.active.seq_id for slot in rig.memory.active_slots}
    sequences = rig.engine.sequences
    return [list(sequences.tokens(one)) for one in sequences.memory if one not in running]


@pytest.mark.parametrize("fault", ["refuse", "lose_cells", "fail_job"])
def test_a_fault_of_the_late_tick_of_a_job_that_has_ended_has_no_effect(fault: str) -> None:
    job = make_job(max_tokens=40, stop=[bytes(letters(5)[3:]).decode()])
    rig = Rig(job)
    rig.prefill()
    rig.tick(repeats=2)
    batch = rig.scheduler.plan()
    results = rig.engine.run(batch)
    assert rig.scheduler.repeater.next_batch(results) is not None
    match fault:
        case "refuse":
            rig.engine.refuse()
        case "lose_cells":
            rig.engine.lose_cells(job.id)
        case "fail_job":
            rig.engine.fail_job(job.id)
    late = rig.engine.run(batch)
    rig.outputs += rig.scheduler.repeater.late_outputs(batch, results, 0.0).outputs
    assert rig.scheduler.repeater.has_stopped
    rig.outputs += rig.scheduler.apply(batch, late).outputs
    rig.scheduler.check_integrity()
    assert (rig.end(job).reason, rig.end(job).error) == (FinishReason.STOP, None)
    assert rig.tokens(job) == letters(5)
    assert not rig.scheduler.has_work


def test_a_deadline_ends_the_repetition() -> None:
    class TickingEngine(FakeEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            clock.now_s += 1.0
            return super().run(batch)

    clock = ManualClock()
    engine = TickingEngine()
    scheduler = make_scheduler(engine, make_memory(engine), clock=clock)
    job = make_job(max_tokens=90, timeout_s=10)
    scheduler.submit(job)
    outputs = [*run_tick(scheduler, engine), *run_tick(scheduler, engine, repeats=MANY)]
    assert len(engine.batches) == 10, "each takes a second"
    outputs += run_tick(scheduler, engine, repeats=MANY)
    [end] = [out for out in outputs if isinstance(out, JobEnded)]
    assert (end.reason, end.stats.generated_tokens) == (FinishReason.DEADLINE, 10)


@pytest.mark.parametrize("repeats", [0, MANY])
def test_after_the_time_of_generation_the_next_line_break_ends_the_job(repeats: int) -> None:
    class TickingEngine(FakeEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            clock.now_s += 1.0
            return super().run(batch)

    def next_token(history: Sequence[int]) -> int:
        return ord("\n") if (len(history) - 20) % 4 == 3 else ord("a")  # "aaa\naaa\n..."

    clock = ManualClock()
    engine = TickingEngine(next_token=next_token, n_batch=32)
    scheduler = make_scheduler(engine, make_memory(engine), clock=clock, chunk_size=4)
    job = make_job([7] * 20, max_tokens=90, generation_timeout_s=5)
    scheduler.submit(job)
    outputs: list[Output] = []
    while scheduler.has_work:
        outputs += run_tick(scheduler, engine, repeats=repeats)
    [end] = [out for out in outputs if isinstance(out, JobEnded)]
    text = "".join(out.text for out in outputs if isinstance(out, NewToken))
    assert text == "aaa\naaa\n"  # the prompt took 5 seconds, and the first token does not count
    assert (end.reason, end.stats.generated_tokens) == (FinishReason.DEADLINE, 8)


@pytest.mark.parametrize("repeats", [0, MANY])
def test_a_line_with_too_little_indentation_ends_the_job(repeats: int) -> None:
    answer = b"x\n  y\nz and more"
    engine = FakeEngine(next_token=lambda history: answer[len(history) - 3])
    scheduler = make_scheduler(engine, make_memory(engine))
    scheduler.submit(make_job([7] * 3, max_tokens=12, n_indent=2))
    outputs: list[Output] = []
    while scheduler.has_work:
        outputs += run_tick(scheduler, engine, repeats=repeats)
    [end] = [out for out in outputs if isinstance(out, JobEnded)]
    assert "".join(out.text for out in outputs if isinstance(out, NewToken)) == "x\n  y\n"
    assert (end.reason, end.stats.stop_string, end.stats.generated_tokens) == (FinishReason.STOP, None, 7)


def test_the_deadline_of_a_waiting_job_ends_the_repetition() -> None:
    running, waiting = make_job(max_tokens=90), make_job(max_tokens=1)
    rig = Rig(running, waiting, n_slots=1)
    waiting.times.deadline_s = rig.clock() + 5
    rig.prefill()
    assert rig.tick(repeats=3) == 3
    rig.clock.now_s += 5
    rig.tick()
    assert rig.end(waiting).reason is FinishReason.DEADLINE


def test_jobs_take_cells_without_a_plan_only_up_to_those_ahead_of_a_preemption() -> None:
    jobs = [make_job(max_tokens=90), make_job(max_tokens=90)]
    rig = Rig(*jobs, n_ctx=120)
    rig.prefill()
    n_ticks = 1 + rig.tick()
    assert 0 <= 120 - 2 * (len(PROMPT) + n_ticks + CELLS_AHEAD) < 2 * 2
    while rig.scheduler.has_work:
        rig.tick()
    assert rig.scheduler.cache_snapshot().preemptions > 0
    assert [rig.tokens(job) for job in jobs] == [letters(90), letters(90)]


def test_cached_entries_are_evicted_as_early_as_with_a_plan_for_each_tick() -> None:
    def evict(repeats: int) -> list[int]:
        """Return how many cells are in use at each eviction."""
        rig = Rig(make_job([7] * 50, max_tokens=1), n_ctx=200, margin=20, caches=True)
        rig.prefill()
        rig.scheduler.submit(make_job([9] * 50, max_tokens=140))
        used: list[int] = []
        while rig.scheduler.has_work:
            rig.tick(repeats)
            snapshot = rig.scheduler.cache_snapshot()
            if snapshot.evictions > len(used):
                used.append(snapshot.used_cells)
        return used

    assert evict(MANY) == evict(0) != []


def test_a_tick_is_not_repeated_while_an_interactive_job_may_preempt_a_bulk_job() -> None:
    large, bulk = make_job([7] * 100, max_tokens=60), make_job(max_tokens=80, priority=Priority.BULK)
    rig = Rig(large, bulk, n_ctx=256, n_slots=3)
    while len(rig.tokens(large)) < 2:
        rig.tick(repeats=0)
    rig.scheduler.submit(make_job([8] * 150, max_tokens=2))  # there is room for it only when the large job has ended
    assert [rig.tick() for _ in range(20)] == [0] * 20
    rig.scheduler.cancel(bulk.id)
    rig.tick()
    assert rig.tick() > 0, "no bulk job is left"


def test_ticks_are_repeated_while_jobs_wait_that_cannot_preempt() -> None:
    rig = Rig(*[make_job(max_tokens=30) for _ in range(2)], *[make_job(max_tokens=3) for _ in range(5)])
    rig.prefill()
    assert rig.tick() == 28


class LateDrafter:
    """Drafts one token, from a number of tokens on."""

    def __init__(self, n_before: int) -> None:
        self.n_before = n_before
        self.searched: list[int] = []

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        self.searched.append(len(history) - len(PROMPT))
        return Draft((next_letter(history),)[:n_max]) if len(history) - len(PROMPT) >= self.n_before else Draft()


def gaps(positions: Iterable[int]) -> list[int]:
    """Return the differences of positions that follow each other."""
    return [later - earlier for earlier, later in pairwise(positions)]


def test_texts_are_searched_for_drafts_the_less_often_the_longer_none_was_found() -> None:
    drafter = LateDrafter(800)
    job = make_job(max_tokens=840, drafting=Drafting(drafter, 4))
    rig = Rig(job, make_job(max_tokens=840), draft_tokens=8)
    rig.prefill()
    assert rig.tick(n_late=1) > 810, "neither a search nor a draft needs a plan"
    run_all(rig)
    n_first = 4 * SEARCHES_PER_TICK
    expected = [at // SEARCHES_PER_TICK + 1 for at in range(3, n_first + 3)]
    assert gaps(drafter.searched[: n_first + 1]) == expected
    assert max(gaps(drafter.searched)) == MAX_UNSEARCHED + 1
    after = [n_tokens for n_tokens in drafter.searched if n_tokens >= 800]
    assert len(after) > 5
    assert set(gaps(after[4:12])) == {2}, "as soon as the time of drafts is known, each tick has one that is accepted"
    assert rig.tokens(job) == letters(840)


def test_after_a_prompt_texts_are_searched_for_drafts_in_each_tick_again() -> None:
    drafter = LateDrafter(1000)
    rig = Rig(make_job(max_tokens=300, drafting=Drafting(drafter, 4)), draft_tokens=8)
    rig.prefill()
    rig.tick(100, n_late=1)
    assert gaps(drafter.searched)[-1] > 3
    rig.scheduler.submit(make_job(max_tokens=100))
    rig.prefill()
    n_before = len(drafter.searched)
    rig.tick(20, n_late=1)
    expected = [at // SEARCHES_PER_TICK + 1 for at in range(3, 9)]
    assert gaps(drafter.searched[n_before:])[:6] == expected


def test_ticks_are_repeated_up_to_the_next_search_if_this_search_needs_a_plan() -> None:
    sequences = DraftSequences(2, n_cells=1000, n_vocab=ByteVocab.n_tokens, held_cells=0)
    slow = DraftWork(n_steps=1, n_step_drafts=1, steps_s=1.0)  # so slow that the draft model is not tried
    speculation = DraftModelSpeculation(ByteVocab.end_tokens, 8, sequences, max_missing=64, measured=[slow])
    rig = Rig(make_job(max_tokens=90, drafting=Drafting(None, 4)), speculation=speculation)
    rig.prefill()
    n_searches = 5 * SEARCHES_PER_TICK
    assert [rig.tick() for _ in range(n_searches)] == [at // SEARCHES_PER_TICK for at in range(1, n_searches + 1)]


def drafting_job(max_tokens: int, wrong_at: int | None = None, **options: Any) -> Job:
    """Return a job whose drafts have at most four tokens."""
    return make_job(max_tokens=max_tokens, drafting=Drafting(Oracle(wrong_at=wrong_at), 4), **options)


@pytest.mark.parametrize("n_late", [1, 3, 6])
@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_ticks_with_drafts_are_repeated_and_tokens_that_are_not_accepted_leave_no_cells(
    wrong_at: int | None, n_late: int
) -> None:
    jobs = [drafting_job(60, wrong_at), drafting_job(60), make_job(max_tokens=60)]
    rig = Rig(*jobs, n_slots=3, draft_tokens=12)
    rig.prefill()
    rig.tick(0)  # measures the time of a tick without drafts
    n_plans = 0
    while rig.scheduler.has_work:
        rig.tick(n_late=n_late)
        n_plans += 1
    assert n_plans < 12, "when a job has few tokens left, a draft could end it"
    assert sum(batch.n_drafts for batch in rig.engine.batches) > 4
    assert [rig.tokens(job) for job in jobs] == [letters(60)] * 3
    drafted = [rig.end(job).stats for job in jobs[:2]]
    assert sum(one.drafted_tokens or 0 for one in drafted) == sum(batch.n_drafted for batch in rig.engine.batches)
    assert drafted[1].accepted_tokens == drafted[1].drafted_tokens


def test_several_tokens_of_a_stream_with_stop_strings_need_a_plan() -> None:
    stop = bytes(letters(20)[18:]).decode()
    stopped, other = drafting_job(60, stop=[stop]), make_job(max_tokens=60)
    rig = Rig(stopped, other, caches=True, draft_tokens=8)
    rig.prefill()
    while not any(isinstance(out, JobEnded) for out in rig.outputs):
        rig.tick()
    assert rig.tokens(stopped) == letters(20)
    assert rig.end(stopped).stats.generated_tokens == 20
    assert cached_tokens(rig) == [[*PROMPT, *letters(20)]] or cached_tokens(rig) == [[*PROMPT, *letters(19)]]


def test_a_batch_with_drafts_that_was_refused_is_computed_without_them() -> None:
    job = drafting_job(40)
    rig = Rig(job, make_job(max_tokens=40), draft_tokens=8)
    rig.prefill()
    rig.tick(3, n_late=1)
    rig.engine.refuse()
    rig.tick(3, n_late=1)
    run_all(rig)
    stats = rig.end(job).stats
    assert rig.tokens(job) == letters(40)
    assert stats.accepted_tokens == stats.drafted_tokens


def test_several_tokens_of_a_stream_with_a_grammar_need_a_plan() -> None:
    job = drafting_job(40, sampler=PreparingSampler())
    rig = Rig(job, draft_tokens=8)
    rig.prefill()
    while rig.scheduler.has_work:
        n_before = len(rig.tokens(job))
        n_repeated = rig.tick(n_late=1)
        batches = rig.engine.batches[-1 - n_repeated :]
        assert not any(batch.n_drafts for batch in batches[:-1])
        assert len(rig.tokens(job)) - n_before == len(batches) + batches[-1].n_drafted
    assert rig.tokens(job) == letters(40)
    assert rig.end(job).stats.drafted_tokens


@pytest.mark.parametrize("n_late", [1, MANY])
def test_the_draft_beside_the_last_token_before_a_stop_string_leaves_no_cells(n_late: int) -> None:
    for n_tokens in range(6, 30):
        stop = bytes(letters(n_tokens)[-2:]).decode()
        job = drafting_job(60, wrong_at=0, stop=[stop])
        rig = Rig(job, caches=True, draft_tokens=8)
        while rig.scheduler.has_work:
            rig.tick(n_late=n_late)  # checks the cells of the cache
        assert rig.end(job).reason is FinishReason.STOP
        [held] = cached_tokens(rig)
        assert held == [*PROMPT, *rig.tokens(job)][: len(held)]


def test_only_one_draft_is_verified_before_the_time_of_drafts_is_known() -> None:
    rig = Rig(drafting_job(60), draft_tokens=8)
    rig.prefill()
    rig.tick(0)
    rig.tick(20, n_late=MANY)
    assert [batch.n_drafts for batch in rig.engine.batches[2:]].count(1) == 1


def test_a_draft_that_cannot_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(drafting_job(60, wrong_at=0), draft_tokens=8)
    rig.prefill()
    rig.tick(0)
    monkeypatch.setattr(rig.engine.sequences, "cut", lambda *_: 0)
    with pytest.raises(EngineError, match="could not remove the draft tokens"):
        rig.tick(n_late=1)


def test_drafts_of_repeated_ticks_use_only_the_room_that_the_batch_and_the_cells_have() -> None:
    jobs = [drafting_job(90), drafting_job(90)]
    rig = Rig(*jobs, n_ctx=150, draft_tokens=100)  # the fake engine raises an error if there are too few cells
    while rig.scheduler.has_work:
        rig.tick(n_late=1)
    assert [rig.tokens(job) for job in jobs] == [letters(90)] * 2


def test_the_ticks_of_a_worker_that_drafts_are_repeated_if_no_job_drafts() -> None:
    rig = Rig(make_job(max_tokens=40), draft_tokens=8)
    rig.prefill()
    assert rig.tick() == 38


class OddStrategy:
    """A strategy of a user: decodes for one slot after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        batch = DecodeMaximal().build_batch(slots, budget, chunk_size, queue_depth=queue_depth)
        self._turn += 1
        return Batch(batch.decode[self._turn % 2 :][:1], batch.prefill) if len(batch.decode) == 2 else batch


def test_the_ticks_of_an_unknown_strategy_are_not_repeated() -> None:
    rig = Rig(make_job(max_tokens=9), strategy=OddStrategy())
    rig.prefill()
    assert rig.tick() == 0


def test_a_job_that_has_ended_is_reported_before_ticks_are_repeated() -> None:
    rig = Rig(make_job(max_tokens=90), make_job(max_tokens=90, timeout_s=3))
    rig.prefill()
    rig.clock.now_s += 5
    assert rig.tick() == 0
    assert [type(out) for out in rig.outputs].count(JobEnded) == 1
    assert rig.tick() > 0


def test_the_strategy_gets_the_time_of_each_repeated_tick() -> None:
    class Watching(DecodeMaximal):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def record_tick(self, tick: TickTime) -> None:
            self.seconds.append(round(tick.seconds, 6))

    strategy = Watching()
    rig = Rig(make_job(max_tokens=9), strategy=strategy)
    repeater, start_s = rig.scheduler.repeater, rig.clock()
    rig.prefill()
    rig.scheduler._strategy._is_trusted = True
    batch = rig.scheduler.plan()
    ticks = []
    for at_s in (1, 3, 6):
        results = rig.engine.run(batch)
        assert repeater.next_batch(results) is not None
        ticks.append((results, start_s + at_s))
    rig.clock.now_s = start_s + 10
    for results, ended_s in ticks:
        repeater.late_outputs(batch, results, ended_s)
    rig.scheduler.apply(batch, rig.engine.run(batch))
    assert strategy.seconds == [0, 1, 2, 3, 4]


class PreparingSampler(GreedySampler):
    """Records what is prepared."""

    can_prepare = True

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[list[int], tuple[int, ...]]] = []

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        self.prepared.append((list(history[n_prompt:n_history]), tuple(draft)))


def test_draws_are_prepared_along_the_draft_for_the_history_of_the_batch() -> None:
    sampler = PreparingSampler()
    rig = Rig(make_job(max_tokens=20, sampler=sampler), make_job(max_tokens=20))
    repeater = rig.scheduler.repeater
    assert repeater is not None
    rig.prefill()
    rig.tick(0)
    constrained, plain = (slot for slot in rig.memory.active_slots)
    if constrained.active.job.sampler is not sampler:
        constrained, plain = plain, constrained
    prepare = repeater.preparation(Batch((DecodeToken(plain), DecodeToken(constrained, Draft((5, 6))))))
    assert prepare is not None
    generated = constrained.active.tokens[constrained.active.n_prompt :]
    rig.tick(0)  # the other thread is late, and the history has got another token
    prepare()
    assert sampler.prepared == [(generated, (5, 6))]
    assert repeater.preparation(Batch((DecodeToken(plain),))) is None
