"""`LatencyTarget` on simulated ticks. A function gives the true time of each tick; a seeded generator adds noise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from tests.worker.scheduling.strategies.test_batch_strategies import slots_of

from llamaq.common.errors import InvalidSettings
from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.slot import Slot
from llamaq.worker.plugins import load_strategy
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal, TickTimeReader
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.scheduling.strategies.latency_target import MAX_TICKS_WITH_PROMPTS, LatencyTarget
from llamaq.worker.scheduling.strategies.plan_rules import PlanFault
from llamaq.worker.scheduling.strategies.tick_times import FIRST_TOKENS, TickTime, TickTimer
from llamaq.worker.settings import load_settings
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, make_scheduler, run_tick

N_STREAMS = 7
BUDGET = 2048
TARGET_MS = 50.0

Cost = Callable[[int], float]
"""Returns the true milliseconds of a tick with this number of prompt tokens."""


def linear(decode_ms: float, token_ms: float) -> Cost:
    return lambda n_prefill: decode_ms + n_prefill * token_ms


@dataclass
class Worker:
    """Seven streams and a prompt without end, computed on a simulated machine."""

    cost: Cost
    noise: float = 0.0
    strategy: LatencyTarget = field(default_factory=lambda: LatencyTarget(TARGET_MS))
    random: Random = field(default_factory=lambda: Random(1))
    slots: Sequence[Slot] = field(default_factory=lambda: slots_of(*[0] * N_STREAMS, 10**6))

    def plan(self) -> Batch:
        return self.strategy.build_batch(self.slots, BUDGET, BUDGET, queue_depth=0)

    def compute(self, batch: Batch) -> TickTime:
        ms = self.cost(batch.n_prefill) * self.random.lognormvariate(0, self.noise)
        tick = TickTime(batch.n_decode, batch.n_prefill, ms / 1000)
        self.strategy.record_tick(tick)
        return tick

    def decode_only(self, n_ticks: int) -> None:
        """Run the streams before the prompt arrives."""
        for _ in range(n_ticks):
            self.compute(self.strategy.build_batch(self.slots[:N_STREAMS], BUDGET, BUDGET, queue_depth=0))

    def run(self, n_ticks: int) -> list[TickTime]:
        return [self.compute(self.plan()) for _ in range(n_ticks)]


def share_over_target(ticks: Sequence[TickTime]) -> float:
    return sum(tick.seconds * 1000 > TARGET_MS for tick in ticks) / len(ticks)


def mean_prefill(ticks: Sequence[TickTime]) -> float:
    return sum(tick.n_prefill for tick in ticks) / len(ticks)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15, 0.3])
def test_at_most_one_tick_of_twenty_is_longer_than_the_target(noise: float) -> None:
    worker = Worker(linear(5, 0.1), noise)
    worker.decode_only(10)
    ticks = worker.run(1000)
    assert share_over_target(ticks) <= 0.05
    assert all(tick.n_decode == N_STREAMS for tick in ticks), "every stream gets its token in every tick"
    # (50 - 5) / 0.1 tokens fit without noise. Noise costs a part of them, and no more than it must.
    assert mean_prefill(ticks) >= {0.0: 370, 0.05: 320, 0.15: 250, 0.3: 170}[noise]


def test_single_slow_ticks_change_the_plan_little() -> None:
    worker = Worker(linear(5, 0.1), 0.05)
    calm = mean_prefill(worker.run(500))
    usual = worker.cost
    worker.cost = lambda n_prefill: usual(n_prefill) * (3 if worker.random.random() < 0.02 else 1)
    disturbed = worker.run(500)
    assert share_over_target(disturbed) <= 0.06
    assert mean_prefill(disturbed) > 0.75 * calm


def test_a_machine_that_becomes_four_times_slower_misses_the_target_for_two_ticks_only() -> None:
    worker = Worker(linear(5, 0.1))
    worker.run(100)
    worker.cost = linear(5, 0.4)
    after = worker.run(50)
    assert [tick.seconds * 1000 > TARGET_MS for tick in after[:2]] == [True, True]
    assert share_over_target(after[2:]) == 0.0
    worker.cost = linear(5, 0.1)
    assert worker.run(20)[-1].n_prefill > 300, "and it uses the time again when the machine is fast again"


def test_chunks_shrink_while_attention_makes_prompt_tokens_more_expensive() -> None:
    worker = Worker(linear(5, 0.02))
    n_past = 0

    def cost(n_prefill: int) -> float:
        nonlocal n_past
        n_past = (n_past + n_prefill) % 4000
        return 5 + n_prefill * (0.02 + 0.2 * n_past / 4000)

    worker.cost = cost
    assert share_over_target(worker.run(1000)) <= 0.05


def test_a_worker_that_knows_nothing_measures_the_streams_and_then_doubles_the_prompt_tokens() -> None:
    worker = Worker(linear(5, 0.01))
    assert [tick.n_prefill for tick in worker.run(6)] == [0, *(FIRST_TOKENS * 2**tick for tick in range(5))]


def test_without_streams_prompts_get_the_whole_budget() -> None:
    worker = Worker(linear(5, 1.0), slots=slots_of(10**6, 10**6))
    worker.run(10)
    assert worker.plan().n_prefill == BUDGET


@pytest.mark.parametrize("n_decode_ticks", [0, 5])
def test_prompts_get_a_quarter_of_the_streams_time_when_streams_alone_exceed_the_target(n_decode_ticks: int) -> None:
    worker = Worker(linear(60, 0.1), 0.05)
    worker.decode_only(n_decode_ticks)
    ticks = worker.run(200)
    assert mean_prefill(ticks[100:]) == pytest.approx(60 / 4 / 0.1, rel=0.3)


def test_a_prompt_token_that_takes_longer_than_the_target_is_computed_all_the_same() -> None:
    worker = Worker(linear(5, 400))
    worker.decode_only(5)
    assert sum(tick.n_prefill == 1 for tick in worker.run(40)) > 30


def test_one_tick_of_33_measures_the_streams_alone_while_prompts_never_pause() -> None:
    ticks = Worker(linear(5, 0.1)).run(200)
    alone = [index for index, tick in enumerate(ticks) if not tick.n_prefill]
    assert alone == list(range(0, 200, MAX_TICKS_WITH_PROMPTS + 1))


def test_a_tick_measures_the_streams_alone_when_their_number_has_changed_much() -> None:
    worker = Worker(linear(45, 0.1))
    worker.decode_only(5)
    many = worker.run(30)
    worker.cost, worker.slots = linear(5, 0.1), slots_of(0, 0, 0, 10**6)
    few = worker.run(20)
    assert [bool(tick.n_prefill) for tick in few] == [False, *[True] * 19]
    assert few[-1].n_prefill > 3 * many[-1].n_prefill


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_with_other_load_does_not_stop_the_prompt(seed: int) -> None:
    """Half of the ticks wait for a core: the streams alone miss the target then, and the prompt is not the cause."""
    worker = Worker(linear(8, 0.1), 0.05, random=Random(seed))
    worker.cost = lambda n_prefill: 8 + n_prefill * 0.1 + (worker.random.random() < 0.5) * worker.random.uniform(0, 50)
    worker.decode_only(20)
    ticks = worker.run(300)
    assert sum(tick.n_prefill <= 2 for tick in ticks) < 60
    assert mean_prefill(ticks) > 50


def test_the_strategy_shows_what_it_has_learned() -> None:
    worker = Worker(linear(5, 0.1))
    assert repr(worker.strategy) == (
        "<LatencyTarget 50 ms <TickTimeModel 0.0 ms for 0 streams, 0.000 ms a prompt token, factor 1.25>>"
    )
    worker.decode_only(5)
    worker.run(70)
    assert repr(worker.strategy) == (
        "<LatencyTarget 50 ms <TickTimeModel 5.0 ms for 7 streams, 0.100 ms a prompt token, factor 1.00>>"
    )


# ---- how the times reach a strategy


class Recorder(DecodeMaximal):
    """A user's strategy that stores the times."""

    def __init__(self) -> None:
        self.ticks: list[TickTime] = []

    def record_tick(self, tick: TickTime) -> None:
        self.ticks.append(tick)


def test_the_scheduler_reports_every_tick_to_a_strategy_that_reads_times() -> None:
    clock, engine, strategy = ManualClock(), FakeEngine(n_ctx=512, n_batch=32), Recorder()
    assert isinstance(strategy, TickTimeReader)
    compute = engine.run

    def run(batch: Batch) -> object:
        clock.now_s += batch.n_tokens
        return compute(batch)

    engine.run = run  # type: ignore[method-assign, assignment]
    scheduler = make_scheduler(engine, make_memory(engine), strategy=strategy, clock=clock)
    for _ in range(2):
        scheduler.submit(make_job([7] * 20, max_tokens=2))
        clock.now_s += 100  # the worker was idle: this is no part of a tick
        run_tick(scheduler, engine)
        clock.now_s += 0.5  # between two ticks of a stream: a part of the second one
        run_tick(scheduler, engine)
        run_tick(scheduler, engine)
    once = [TickTime(0, 16, 16.0), TickTime(0, 4, 4.5), TickTime(1, 0, 1.0)]
    assert strategy.ticks == once * 2


def test_a_timer_measures_from_the_end_of_the_tick_before_unless_there_was_a_pause() -> None:
    clock = ManualClock(0.0)
    timer = TickTimer(clock)
    assert timer.end(clock(), begins_next=False) == 0.0, "nothing was planned"
    timer.begin()
    clock.now_s = 1.0
    assert timer.end(clock(), begins_next=True) == 1.0
    clock.now_s = 1.5
    timer.begin()
    clock.now_s = 3.0
    assert timer.end(clock(), begins_next=False) == 2.0
    clock.now_s = 10.0
    timer.begin()
    clock.now_s = 11.0
    assert timer.end(clock(), begins_next=True) == 1.0


def test_a_strategy_that_raises_on_a_time_is_logged_once_and_its_batches_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Raises(DecodeMaximal):
        def record_tick(self, tick: TickTime) -> None:
            raise ZeroDivisionError(tick.n_decode)

    guarded = GuardedStrategy(Raises(), TickLimits(10, 8))
    for _ in range(2):
        guarded.record_tick(Batch((DecodeToken(Slot(0)),)), 1.0)
    assert guarded.faults == {PlanFault.RAISED: 2}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


# ---- the setting


def test_the_target_is_a_setting_of_this_strategy() -> None:
    settings = load_settings(batch_strategy="latency-target", target_itl_ms=20.0)
    strategy = load_strategy(settings.batch_strategy, settings.target_itl_ms)
    assert isinstance(strategy, LatencyTarget)
    assert strategy.target_itl_ms == 20.0
    default = load_strategy("latency-target")
    assert isinstance(default, LatencyTarget)
    assert default.target_itl_ms == 50.0


def test_a_target_without_this_strategy_is_an_error() -> None:
    with pytest.raises(InvalidSettings, match=r"--target-itl-ms \(LLAMAQ_TARGET_ITL_MS\): only --batch-strategy"):
        load_settings(target_itl_ms=20.0)


def test_a_strategy_of_a_user_still_reads_the_earlier_name_of_tokens_ahead() -> None:
    assert TickTime(2, 0, 0.01, n_ahead=5).n_drafted == 5
