"""The order of admission, the ticks of running jobs, and what the scheduler tells about them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.outputs import tokens_of
from tests.support.ticked_jobs import TickedJobs, ends_of, only_end

from llamaq.common.errors import ErrorCode, InvalidSettings
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.outputs import JobEnded, Output, SlotAcquired, SlotLost
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.waiting_queue import MAX_OVERTAKEN
from llamaq.worker.testing import (
    make_job,
)

# ---- order of admission


def test_interactive_jobs_are_admitted_before_bulk_jobs_and_each_priority_in_order() -> None:
    rig = TickedJobs(n_slots=1)
    rig.submit(*(make_job(job_id=f"b{number}", max_tokens=1, priority="bulk") for number in range(2)))
    rig.submit(*(make_job(job_id=f"i{number}", max_tokens=1) for number in range(2)))
    assert list(ends_of(rig.finish())) == ["i0", "i1", "b0", "b1"]


def test_small_jobs_pass_a_large_one_that_does_not_fit_a_bounded_number_of_times() -> None:
    rig = TickedJobs(n_slots=3, n_ctx=120)
    small = (make_job([7] * 10, max_tokens=6) for _ in range(1000))
    rig.submit(next(small))
    rig.tick()
    rig.submit(make_job([7] * 105, job_id="large", max_tokens=8))
    outputs: list[Output] = []
    while "large" not in rig.running:
        rig.submit(next(small))
        outputs += rig.tick(2)
    n_passed = sum(isinstance(output, SlotAcquired) for output in outputs) - 1
    assert n_passed == MAX_OVERTAKEN
    assert "large" in ends_of(rig.finish())


def test_a_bulk_job_that_waits_for_room_does_not_delay_interactive_jobs() -> None:
    rig = TickedJobs(n_slots=3, n_ctx=100)
    rig.submit(make_job([7] * 10, job_id="first", max_tokens=40))
    rig.submit(make_job([7] * 80, job_id="bulk", max_tokens=10, priority="bulk"))
    rig.tick()
    rig.submit(make_job([7] * 10, job_id="urgent", max_tokens=20))
    rig.tick()
    assert rig.running == ["first", "urgent"]


def test_submitted_jobs_wait_until_the_next_tick_admits_as_many_as_there_are_slots() -> None:
    rig = TickedJobs(n_slots=4)
    assert (rig.scheduler.n_waiting, rig.scheduler.has_work) == (0, False)
    rig.submit(make_job(max_tokens=9), make_job(max_tokens=9))
    assert (rig.scheduler.n_waiting, rig.scheduler.has_work) == (2, True)
    rig.tick()
    assert (rig.scheduler.n_waiting, len(rig.running)) == (0, 2)
    rig.submit(*(make_job(max_tokens=9) for _ in range(5)))
    rig.tick()
    assert (rig.scheduler.n_waiting, len(rig.running)) == (3, 4)


def test_prompts_larger_than_half_the_pool_run_one_after_another() -> None:
    rig = TickedJobs(n_slots=4, n_ctx=100)
    rig.submit(*(make_job([7] * 51, job_id=f"j{number}", max_tokens=30) for number in range(3)))
    outputs = rig.finish()
    assert {end.reason for end in ends_of(outputs).values()} == {FinishReason.LENGTH}
    assert max(len(batch.parts) for batch in rig.engine.batches) == 1


# ---- ticks


def test_a_long_prompt_is_prefilled_in_chunks_between_the_tokens_of_others() -> None:
    rig = TickedJobs(n_slots=2, chunk_size=8)
    rig.submit(make_job("Hi", job_id="stream", max_tokens=30))
    rig.tick(2)
    rig.submit(make_job([7] * 50, job_id="long", max_tokens=2))
    for _ in range(7):
        outputs = rig.tick()
        assert len(tokens_of(outputs, "stream")) == 1
        assert tokens_of(outputs, "long") == []
    assert len(tokens_of(rig.tick(), "long")) == 1
    assert [batch.n_prefill for batch in rig.engine.batches[-8:]] == [7, 7, 7, 7, 7, 7, 7, 1]


def test_a_job_whose_cells_were_lost_is_prefilled_again_and_generates_the_same_tokens() -> None:
    rig = TickedJobs(chunk_size=4)
    rig.submit(make_job("Hello there", job_id="j", max_tokens=12))
    expected = tokens_of(rig.finish(), "j")

    rig = TickedJobs(chunk_size=4)
    rig.submit(make_job("Hello there", job_id="j", max_tokens=12))
    outputs = rig.tick(6)
    assert rig.scheduler.snapshot()[0].state == "decode"
    rig.engine.lose_cells("j", 5)
    outputs += rig.tick()
    assert rig.scheduler.snapshot()[0].state == "prefill"
    outputs += rig.tick(1)
    rig.engine.lose_cells("j")
    outputs += rig.finish()
    assert tokens_of(outputs, "j") == expected


def test_when_the_engine_finds_no_room_the_job_admitted_last_is_preempted_and_resumes() -> None:
    rig = TickedJobs()
    rig.submit(*(make_job(job_id=f"j{number}", max_tokens=9) for number in range(2)))
    outputs = rig.tick(3)
    rig.engine.refuse()
    assert [(type(out), out.job.id) for out in rig.tick()] == [(SlotLost, "j1")]
    assert rig.running == ["j0"]
    outputs += rig.finish()
    assert {job_id: end.reason for job_id, end in ends_of(outputs).items()} == dict.fromkeys(
        ("j0", "j1"), FinishReason.LENGTH
    )
    assert tokens_of(outputs, "j0") == tokens_of(outputs, "j1")
    assert len(tokens_of(outputs, "j1")) == 9


def test_a_job_fails_when_the_engine_finds_no_room_although_no_other_job_runs() -> None:
    rig = TickedJobs()
    rig.submit(make_job(max_tokens=9))
    rig.tick(2)
    rig.engine.refuse()
    error = only_end(rig.tick()).error
    assert error is not None
    assert (error.code, "--n-ctx" in error.message) == (ErrorCode.DECODE_FAILED, True)
    assert not rig.scheduler.has_work


def test_a_tick_without_work_gives_an_empty_batch_and_no_output() -> None:
    rig = TickedJobs()
    assert rig.scheduler.plan() == Batch()
    assert rig.tick() == []


def test_a_result_for_a_slot_outside_the_batch_is_a_defect() -> None:
    rig = TickedJobs()
    rig.submit(make_job())
    rig.scheduler.admit()
    with pytest.raises(LookupError, match="was not in the batch"):
        rig.scheduler.apply(Batch(), [SlotResult(rig.memory.slots[0], 1)])


def test_the_queue_depth_for_the_strategy_is_at_least_the_number_of_jobs_that_wait_here() -> None:
    depths: list[int] = []

    class Recording(DecodeMaximal):
        def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
            depths.append(queue_depth)
            return super().build_batch(slots, budget, chunk_size, queue_depth=queue_depth)

    rig = TickedJobs(n_slots=1, strategy=Recording())
    rig.submit(make_job(), make_job(), make_job())
    rig.scheduler.admit()
    rig.scheduler.plan(queue_depth=40)  # the jobs that wait here are among them
    rig.scheduler.plan(queue_depth=0)
    assert depths == [40, 2]


@pytest.mark.parametrize(("budget", "chunk_size", "flag"), [(1, 8, "--n-batch"), (8, 0, "--chunk-size")])
def test_limits_that_no_tick_can_meet_are_refused(budget: int, chunk_size: int, flag: str) -> None:
    with pytest.raises(InvalidSettings, match=flag):
        TickedJobs(n_slots=2, budget=budget, chunk_size=chunk_size)


# ---- views


def test_the_stats_of_a_job_measure_its_attempt() -> None:
    rig = TickedJobs(n_slots=1, chunk_size=8)
    rig.submit(make_job(max_tokens=1))
    rig.submit(make_job([7] * 12, job_id="j", max_tokens=5, queue_ms=33.0, stream=False))
    rig.clock.now_s += 1
    rig.tick()  # the first job runs in the only slot
    rig.clock.now_s += 2
    outputs = rig.tick()  # the second job is admitted, and its first chunk is computed
    rig.clock.now_s += 0.5
    outputs += rig.tick()  # its first token is generated
    for _ in range(4):
        rig.clock.now_s += 0.25
        outputs += rig.tick()
    assert only_end(outputs).stats == JobStats(
        prompt_tokens=12,
        generated_tokens=5,
        duration_ms=1500,
        ttft_ms=500,
        prompt_eval_rate=24,
        generation_rate=4,
        prefix_cache_tokens=0,
        prefix_cache_ratio=0,
        queue_ms=33,
        seq_id=outputs[-1].stats.seq_id if isinstance(outputs[-1], JobEnded) else None,
        slot=0,
        worker="w1",
        mode="generate",
    )


def test_a_job_that_never_had_a_slot_has_stats_too() -> None:
    rig = TickedJobs(n_slots=1)
    rig.submit(make_job(max_tokens=100), make_job("Hello", job_id="j", queue_ms=5))
    rig.tick()
    rig.clock.now_s += 2
    rig.scheduler.cancel("j")
    assert ends_of(rig.tick())["j"].stats == JobStats(prompt_tokens=6, queue_ms=5, worker="w1")


def test_snapshots_and_repr_show_the_live_state() -> None:
    rig = TickedJobs(n_slots=2, n_ctx=100)
    rig.submit(make_job([7] * 10, job_id="j", max_tokens=20), make_job([7] * 90))
    rig.tick(3)
    first, second = rig.scheduler.snapshot()
    assert (first.state, first.job_id, first.prompt_tokens, first.prefilled_tokens) == ("decode", "j", 10, 10)
    assert first.generated_tokens == 2
    assert second.state == "idle"
    cells = rig.scheduler.cache_snapshot()
    assert (cells.n_cells, cells.reserved_cells, cells.entries) == (100, 20, 0)
    assert repr(rig.scheduler) == "<Scheduler 1/2 slots, 1 waiting>"
