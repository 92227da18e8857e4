"""A tick is repeated without a plan only while the next plan would be the same, and its tokens are as with plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.repeated_ticks_rig import END_AT, MANY, PROMPT, RepeatedTicksRig, cached_tokens, letters, run_all

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.outputs import JobEnded, NewToken, Output
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.preemption import CELLS_AHEAD
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.tick_times import TickTime
from llamaq.worker.testing import (
    FakeEngine,
    GreedySampler,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    run_tick,
)


def test_a_tick_is_repeated_until_the_next_token_ends_a_job() -> None:
    long, short = make_job(max_tokens=40), make_job(max_tokens=10)
    rig = RepeatedTicksRig(long, short)
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
    rig = RepeatedTicksRig(job, other)
    rig.prefill()
    assert rig.tick() == END_AT - 1
    assert rig.end(job).reason is FinishReason.STOP
    assert rig.tokens(job) == letters(END_AT, [0])


def test_a_stop_token_of_a_job_ends_the_repetition() -> None:
    n_tokens, stop = next((n, token) for n, token in enumerate(letters(40)) if n > 2 and token not in letters(n))
    job, other = make_job(max_tokens=40, stop_token_ids=[stop]), make_job(max_tokens=40)
    rig = RepeatedTicksRig(job, other)
    rig.prefill()
    assert rig.tick() == n_tokens - 1
    assert rig.end(job).reason is FinishReason.STOP
    assert rig.tokens(job) == letters(n_tokens)
    rig.tick()
    assert rig.tokens(other) == letters(40)


def test_an_error_of_one_job_ends_the_repetition() -> None:
    faulty, other = make_job(max_tokens=40, sampler=GreedySampler(fails_at=6)), make_job(max_tokens=40)
    rig = RepeatedTicksRig(faulty, other)
    rig.prefill()
    assert rig.tick() == 5
    error = rig.end(faulty).error
    assert error is not None
    assert error.code is ErrorCode.GRAMMAR_EXHAUSTED
    assert rig.tick() == 32
    assert rig.tokens(other) == letters(40)


def test_lost_cells_end_the_repetition() -> None:
    job = make_job(max_tokens=20)
    rig = RepeatedTicksRig(job)
    rig.prefill()
    assert rig.tick(repeats=3) == 3
    rig.engine.lose_cells(job.id, 2)
    assert rig.tick() == 0
    run_all(rig)
    assert rig.tokens(job) == letters(20)


def test_a_tick_with_a_prompt_is_not_repeated() -> None:
    rig = RepeatedTicksRig(make_job(max_tokens=90))
    rig.prefill()
    rig.scheduler.submit(make_job("x" * 40, max_tokens=1))
    assert [rig.tick() for _ in range(3)] == [0, 0, 0], "the prompt has three chunks"
    assert rig.tick() > 0


@pytest.mark.parametrize(("n_repeats", "n_ticks"), [(0, 9), (30, 10)])
def test_a_stop_string_ends_a_job_one_tick_late_and_the_late_token_is_not_used(n_repeats: int, n_ticks: int) -> None:
    stop = bytes(letters(9)[7:]).decode()
    stopped, other = make_job(max_tokens=40, stop=[stop]), make_job(max_tokens=40)
    rig = RepeatedTicksRig(stopped, other, caches=True)
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


@pytest.mark.parametrize("fault", ["refuse", "lose_cells", "fail_job"])
def test_a_fault_of_the_late_tick_of_a_job_that_has_ended_has_no_effect(fault: str) -> None:
    job = make_job(max_tokens=40, stop=[bytes(letters(5)[3:]).decode()])
    rig = RepeatedTicksRig(job)
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
    rig = RepeatedTicksRig(running, waiting, n_slots=1)
    waiting.times.deadline_s = rig.clock() + 5
    rig.prefill()
    assert rig.tick(repeats=3) == 3
    rig.clock.now_s += 5
    rig.tick()
    assert rig.end(waiting).reason is FinishReason.DEADLINE


def test_jobs_take_cells_without_a_plan_only_up_to_those_ahead_of_a_preemption() -> None:
    jobs = [make_job(max_tokens=90), make_job(max_tokens=90)]
    rig = RepeatedTicksRig(*jobs, n_ctx=120)
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
        rig = RepeatedTicksRig(make_job([7] * 50, max_tokens=1), n_ctx=200, margin=20, caches=True)
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
    rig = RepeatedTicksRig(large, bulk, n_ctx=256, n_slots=3)
    while len(rig.tokens(large)) < 2:
        rig.tick(repeats=0)
    rig.scheduler.submit(make_job([8] * 150, max_tokens=2))  # there is room for it only when the large job has ended
    assert [rig.tick() for _ in range(20)] == [0] * 20
    rig.scheduler.cancel(bulk.id)
    rig.tick()
    assert rig.tick() > 0, "no bulk job is left"


def test_ticks_are_repeated_while_jobs_wait_that_cannot_preempt() -> None:
    rig = RepeatedTicksRig(*[make_job(max_tokens=30) for _ in range(2)], *[make_job(max_tokens=3) for _ in range(5)])
    rig.prefill()
    assert rig.tick() == 28


class OddStrategy:
    """A strategy of a user: decodes for one slot after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        batch = DecodeMaximal().build_batch(slots, budget, chunk_size, queue_depth=queue_depth)
        self._turn += 1
        return Batch(batch.decode[self._turn % 2 :][:1], batch.prefill) if len(batch.decode) == 2 else batch


def test_the_ticks_of_an_unknown_strategy_are_not_repeated() -> None:
    rig = RepeatedTicksRig(make_job(max_tokens=9), strategy=OddStrategy())
    rig.prefill()
    assert rig.tick() == 0


def test_a_job_that_has_ended_is_reported_before_ticks_are_repeated() -> None:
    rig = RepeatedTicksRig(make_job(max_tokens=90), make_job(max_tokens=90, timeout_s=3))
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
    rig = RepeatedTicksRig(make_job(max_tokens=9), strategy=strategy)
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
