"""Jobs that use the adapters with different scales are computed in turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest

from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.scheduling.adapter_turns import TURN_S, Scales
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, make_scheduler, run_tick, run_to_end

TICK_S = TURN_S / 4
STYLE, TERMS = (1.0, 0.0), (0.0, 1.0)


class RecordingEngine(FakeEngine):
    """Records the scales of the jobs of each batch. Each batch takes `TICK_S`."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(n_ctx=800, n_batch=64, n_seq_max=12)
        self.clock = clock
        self.ticks: list[set[Scales]] = []

    def run(self, batch: Batch) -> list[SlotResult]:
        self.clock.now_s += TICK_S
        if batch:
            self.ticks.append({part.slot.active.job.adapter_scales for part in batch.parts})
        return super().run(batch)

    @property
    def turns(self) -> Iterator[tuple[Scales, int]]:
        """The scales of each turn, and its number of ticks."""
        return ((scales, len(list(ticks))) for scales, ticks in groupby(one for tick in self.ticks for one in tick))


@pytest.mark.parametrize("groups", [(None,), (None, STYLE), (None, STYLE, TERMS), (STYLE, TERMS)])
def test_a_batch_has_jobs_with_the_same_scales_only(groups: tuple[Scales, ...]) -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock)
    scheduler = make_scheduler(engine, make_memory(engine, n_slots=6), clock=clock)
    jobs = [make_job(f"job {number}", max_tokens=30) for number in range(6)]
    for number, job in enumerate(jobs):
        job.adapter_scales = groups[number % len(groups)]
        scheduler.submit(job)
    outputs = run_to_end(scheduler, engine)
    assert all(len(tick) == 1 for tick in engine.ticks)
    assert {output.job.id for output in outputs if isinstance(output, JobEnded)} == {job.id for job in jobs}
    for job in jobs:
        assert sum(isinstance(output, NewToken) and output.job is job for output in outputs) == 30


def test_groups_take_turns_of_equal_length() -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock)
    scheduler = make_scheduler(engine, make_memory(engine, n_slots=6), clock=clock)
    for number in range(6):
        job = make_job(f"job {number}", max_tokens=100)
        job.adapter_scales = (None, STYLE, TERMS)[number // 2]
        scheduler.submit(job)
    for _ in range(60):
        run_tick(scheduler, engine, repeats=50, clock=clock)
    turns = list(engine.turns)
    assert {scales for scales, _ in turns[:3]} == {None, STYLE, TERMS}
    assert all(n_ticks == 4 for _, n_ticks in turns[:-1]), turns
    assert all(before[0] == after[0] for before, after in zip(turns, turns[3:], strict=False)), "round robin"


def test_a_new_group_has_its_turn_before_the_others() -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock)
    scheduler = make_scheduler(engine, make_memory(engine, n_slots=6), clock=clock)
    for scales in (None, STYLE):
        job = make_job("long", max_tokens=200)
        job.adapter_scales = scales
        scheduler.submit(job)
    for _ in range(20):
        run_tick(scheduler, engine)
    n_before = len(engine.ticks)
    job = make_job("new", max_tokens=200)
    job.adapter_scales = TERMS
    scheduler.submit(job)
    for _ in range(5):
        run_tick(scheduler, engine)
    assert {TERMS} in engine.ticks[n_before:]


def test_many_short_jobs_with_other_scales_do_not_keep_a_group_from_its_turn() -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock)
    scheduler = make_scheduler(engine, make_memory(engine, n_slots=3), clock=clock)
    scheduler.submit(make_job("long", max_tokens=200))
    for number in range(100):
        job = make_job(f"short {number}", max_tokens=3)
        job.adapter_scales = (float(number), 1.0)
        scheduler.submit(job)
    for _ in range(60):
        run_tick(scheduler, engine)
    assert engine.ticks.count({None}) >= 60 / 3 - 4


def test_a_group_alone_repeats_its_ticks() -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock)
    scheduler = make_scheduler(engine, make_memory(engine), clock=clock)
    for text in ("one", "two"):
        job = make_job(text, max_tokens=20)
        job.adapter_scales = STYLE
        scheduler.submit(job)
    run_tick(scheduler, engine)
    n_before = len(engine.ticks)
    run_tick(scheduler, engine, repeats=10, clock=clock)
    assert len(engine.ticks) > n_before + 5
