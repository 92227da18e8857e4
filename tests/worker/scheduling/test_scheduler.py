from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.outputs import tokens_of

from llamaq.common.errors import ErrorCode, InvalidSettings, JobRejected
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, Output, SlotAcquired, SlotLost
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy, DecodeMaximal
from llamaq.worker.scheduling.waiting_queue import MAX_OVERTAKEN
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
from llamaq.worker.testing.fake_engine import NextToken

EOS = ByteVocab.eos


class Rig:
    """A scheduler with a fake engine and a manual clock."""

    def __init__(
        self,
        n_slots: int = 2,
        n_ctx: int = 400,
        budget: int = 32,
        chunk_size: int = 8,
        next_token: NextToken = next_letter,
        strategy: BatchStrategy | None = None,
    ) -> None:
        self.engine = FakeEngine(n_ctx=n_ctx, n_batch=budget, n_seq_max=n_slots + 3, next_token=next_token)
        self.memory = make_memory(self.engine, n_slots=n_slots)
        self.clock = ManualClock()
        self.scheduler = make_scheduler(
            self.engine, self.memory, strategy=strategy, chunk_size=chunk_size, worker="w1", clock=self.clock
        )

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.submit(job)

    def tick(self, times: int = 1) -> list[Output]:
        return [output for _ in range(times) for output in run_tick(self.scheduler, self.engine)]

    def finish(self) -> list[Output]:
        return run_to_end(self.scheduler, self.engine)

    @property
    def running(self) -> list[str]:
        return [slot.active.job.id for slot in self.memory.active_slots]


def model_that_generates(text: str, after: int) -> NextToken:
    """Return a model that generates `text` and then an end token, if the prompt has `after` tokens."""
    tokens = [*text.encode(), EOS]
    return lambda history: tokens[len(history) - after]


def ends_of(outputs: list[Output]) -> dict[str, JobEnded]:
    return {output.job.id: output for output in outputs if isinstance(output, JobEnded)}


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, NewToken | JobEnded))


def only_end(outputs: list[Output]) -> JobEnded:
    (end,) = ends_of(outputs).values()
    assert outputs[-1] is end
    return end


# ---- ends of jobs


def test_a_job_ends_with_length_at_max_tokens() -> None:
    rig = Rig()
    job = make_job("Hello", max_tokens=7)
    rig.submit(job)
    outputs = rig.finish()
    assert only_end(outputs).reason is FinishReason.LENGTH
    assert len(tokens_of(outputs, job.id)) == 7
    assert rig.engine.sequences.memory == {}


def test_an_end_token_ends_the_job_and_is_not_part_of_its_text() -> None:
    rig = Rig(next_token=model_that_generates("done", after=6))
    job = make_job("Hello", max_tokens=50)
    rig.submit(job)
    outputs = rig.finish()
    end = only_end(outputs)
    assert end.reason is FinishReason.STOP
    assert bytes(tokens_of(outputs, job.id)) == b"done"
    assert end.stats.generated_tokens == 4


def test_an_end_token_as_first_token_gives_an_empty_result() -> None:
    rig = Rig(next_token=lambda _history: EOS)
    rig.submit(make_job(max_tokens=5))
    end = only_end(rig.finish())
    assert (end.reason, end.stats.generated_tokens, end.stats.ttft_ms) == (FinishReason.STOP, 0, 0.0)


def test_a_token_of_stop_token_ids_ends_its_job_as_an_end_token_does() -> None:
    rig = Rig(next_token=model_that_generates("done", after=6))
    job, other = make_job("Hello", max_tokens=50, stop_token_ids=[ord("n"), ord("x")]), make_job("Hello")
    rig.submit(job)
    rig.submit(other)
    outputs = rig.finish()
    ends = {output.job.id: output for output in outputs if isinstance(output, JobEnded)}
    assert bytes(tokens_of(outputs, job.id)) == b"do"
    assert bytes(tokens_of(outputs, other.id)) == b"done"
    assert [ends[each.id].reason for each in (job, other)] == [FinishReason.STOP, FinishReason.STOP]
    assert [ends[each.id].stats.stop_token for each in (job, other)] == [ord("n"), None]
    assert ends[job.id].stats.generated_tokens == 2


def test_an_end_token_is_named_as_stop_token_only_if_the_job_names_it() -> None:
    for stop_token_ids, stop_token in (([EOS], EOS), ([5], None)):
        rig = Rig(next_token=model_that_generates("done", after=6))
        rig.submit(make_job("Hello", max_tokens=50, stop_token_ids=stop_token_ids))
        assert only_end(rig.finish()).stats.stop_token == stop_token


@pytest.mark.parametrize("resumed", [b"", b"go", b"good EN"])
def test_a_stop_string_within_the_minimum_of_tokens_does_not_end_a_job(resumed: bytes) -> None:
    """The count continues over attempts."""
    rig = Rig(next_token=model_that_generates("good END and the END, at last", after=6))
    job = make_job("Hello", max_tokens=50, stop=["END"], min_tokens=8, resumed=resumed)
    rig.submit(job)
    outputs = rig.finish()
    assert (resumed + bytes(tokens_of(outputs, job.id))) == b"good END and the END"
    assert only_end(outputs).stats.stop_string == "END"


def test_the_text_ends_with_a_stop_string_that_the_job_includes() -> None:
    rig = Rig(next_token=model_that_generates("good END and more", after=6))
    rig.submit(make_job("Hello", max_tokens=50, stop=["END"], include_stop=True))
    outputs = rig.finish()
    assert (text_of(outputs), only_end(outputs).reason) == ("good END", FinishReason.STOP)


def test_a_stop_string_split_over_tokens_ends_the_job_and_is_never_in_the_text() -> None:
    rig = Rig(next_token=model_that_generates("good END and more", after=6))
    rig.submit(make_job("Hello", max_tokens=50, stop=["END"]))
    outputs = rig.finish()
    assert only_end(outputs).reason is FinishReason.STOP
    assert text_of(outputs) == "good "


def test_the_start_of_an_incomplete_stop_string_is_in_the_text_of_the_end() -> None:
    rig = Rig(next_token=model_that_generates("good EN", after=6))
    rig.submit(make_job("Hello", max_tokens=50, stop=["END"]))
    outputs = rig.finish()
    assert only_end(outputs).text == "EN"
    assert text_of(outputs) == "good EN"


def test_a_job_that_reaches_its_context_limit_ends_with_length() -> None:
    rig = Rig()
    job = make_job([7] * 20, max_tokens=100, context_limit=32)
    rig.submit(job)
    outputs = rig.finish()
    assert only_end(outputs).reason is FinishReason.LENGTH
    assert len(tokens_of(outputs, job.id)) == 12


def test_no_context_limit_is_larger_than_the_pool() -> None:
    rig = Rig(n_ctx=64, chunk_size=32)
    rig.submit(make_job([7] * 20, max_tokens=1000, context_limit=10**6))
    outputs = rig.finish()
    assert only_end(outputs).stats.generated_tokens == 44


@pytest.mark.parametrize(("n_prompt", "fails"), [(63, False), (64, True), (5000, True)])
def test_a_prompt_that_fills_the_context_fails_only_its_job_with_both_lengths_in_the_error(
    n_prompt: int, fails: bool
) -> None:
    rig = Rig(n_ctx=64)
    rig.submit(make_job([7] * n_prompt, job_id="large"), make_job("ok", job_id="small", max_tokens=3))
    ends = ends_of(rig.finish())
    assert ends["small"].reason is FinishReason.LENGTH
    if not fails:
        assert (ends["large"].reason, ends["large"].stats.generated_tokens) == (FinishReason.LENGTH, 1)
        return
    error = ends["large"].error
    assert error is not None
    assert error.code is ErrorCode.PROMPT_TOO_LONG
    assert f"{n_prompt} tokens" in error.message
    assert "64" in error.message
    assert "--n-ctx" in error.message


def test_a_prompt_without_tokens_fails_only_its_job() -> None:
    rig = Rig()
    rig.submit(make_job([]))
    error = only_end(rig.finish()).error
    assert error is not None
    assert error.code is ErrorCode.INVALID_REQUEST


def test_an_error_of_a_sampler_fails_only_its_job() -> None:
    rig = Rig()
    rig.submit(make_job(job_id="bad", max_tokens=9, sampler=GreedySampler(fails_at=3)))
    rig.submit(make_job(job_id="good", max_tokens=9))
    outputs = rig.finish()
    ends = ends_of(outputs)
    assert isinstance(ends["bad"].error, JobRejected)
    assert (ends["bad"].error.code, ends["bad"].reason) == (ErrorCode.GRAMMAR_EXHAUSTED, None)
    assert ends["bad"].stats.generated_tokens == 3
    assert (ends["good"].reason, len(tokens_of(outputs, "good"))) == (FinishReason.LENGTH, 9)
    assert rig.engine.sequences.memory == {}


def test_an_error_of_the_engine_for_one_job_fails_only_that_job() -> None:
    rig = Rig()
    rig.engine.fail_job("bad")
    rig.submit(make_job(job_id="bad"), make_job(job_id="good", max_tokens=3))
    ends = ends_of(rig.finish())
    assert ends["bad"].error is not None
    assert ends["bad"].error.code is ErrorCode.DECODE_FAILED
    assert ends["good"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("ticks", [0, 1, 5])
def test_a_cancelled_job_ends_once_with_the_tokens_it_has(ticks: int) -> None:
    rig = Rig()
    job = make_job("Hello", max_tokens=50)
    rig.submit(job)
    before = rig.tick(ticks)
    assert rig.scheduler.cancel(job.id)
    assert not rig.scheduler.cancel(job.id)
    outputs = before + rig.finish()
    end = only_end(outputs)
    assert end.reason is FinishReason.CANCELLED
    assert end.stats.generated_tokens == len(tokens_of(outputs, job.id)) == max(0, ticks)
    assert rig.engine.sequences.memory == {}


def test_cancelling_an_unknown_job_does_nothing() -> None:
    rig = Rig()
    assert not rig.scheduler.cancel("unknown")
    assert not rig.scheduler.release(make_job().lease)
    assert not rig.scheduler.has_work


def test_timeout_s_counts_the_time_in_a_slot_over_all_attempts() -> None:
    rig = Rig(n_slots=1)
    rig.submit(make_job(job_id="first", max_tokens=3), make_job(job_id="late", max_tokens=300, timeout_s=7))
    rig.clock.now_s += 100  # the job waits for a slot
    waiting = next(job for job in rig.scheduler._waiting if job.id == "late")
    waiting.times.slot_s = 2.0  # in an earlier attempt
    rig.tick(4)
    outputs = rig.tick(2)
    rig.clock.now_s += 4.999
    outputs += rig.tick()
    assert "late" not in ends_of(outputs)
    rig.clock.now_s += 0.001
    outputs += rig.tick()
    end = ends_of(outputs)["late"]
    assert end.reason is FinishReason.DEADLINE
    assert end.stats.duration_ms == 5000
    assert end.stats.queue_ms == 100_000
    assert end.stats.slot is not None


def test_deadline_s_ends_a_job_that_waits_for_a_slot() -> None:
    rig = Rig(n_slots=1)
    rig.submit(make_job(max_tokens=300), make_job(job_id="late", max_tokens=300))
    next(job for job in rig.scheduler._waiting if job.id == "late").times.deadline_s = rig.clock.now_s + 5
    outputs = rig.tick(3)
    rig.clock.now_s += 5
    end = ends_of([*outputs, *rig.tick()])["late"]
    assert (end.reason, end.stats.slot, end.stats.queue_ms) == (FinishReason.DEADLINE, None, 5000)


# ---- attempts


def test_a_resumed_job_continues_at_the_next_token() -> None:
    whole = Rig()
    whole.submit(make_job(job_id="j", max_tokens=12))
    tokens = tokens_of(whole.finish(), "j")

    rig = Rig()
    rig.submit(make_job(job_id="j", resumed=tokens[:5], attempt=2, max_tokens=12))
    outputs = rig.finish()
    assert tokens_of(outputs, "j") == tokens[5:]
    assert only_end(outputs).stats.generated_tokens == 12


@pytest.mark.parametrize(
    ("resumed", "params", "reason"),
    [
        (b"abcd", {"max_tokens": 4}, FinishReason.LENGTH),
        (b"abcde", {"max_tokens": 4}, FinishReason.LENGTH),
        (b"abcd", {"max_tokens": 40, "context_limit": 10}, FinishReason.LENGTH),
        (b"abcd", {"max_tokens": 40, "context_limit": 5}, FinishReason.LENGTH),
        (b"abcd", {"max_tokens": 40, "stop": ["cd"]}, FinishReason.STOP),
        (b"abcd", {"max_tokens": 4, "stop": ["cd"]}, FinishReason.STOP),
        ([97, EOS], {"max_tokens": 40}, FinishReason.STOP),
        (b"abcd", {"max_tokens": 40, "stop_token_ids": [ord("d")]}, FinishReason.STOP),
    ],
)
def test_a_resumed_job_that_is_finished_ends_without_a_slot(
    resumed: bytes | list[int], params: dict[str, object], reason: FinishReason
) -> None:
    rig = Rig(n_slots=1)
    rig.submit(make_job(max_tokens=20))
    rig.tick()
    rig.submit(make_job("Hello", job_id="done", resumed=list(resumed), **params))  # type: ignore[arg-type]
    end = ends_of(rig.tick())["done"]
    assert (end.reason, end.stats.slot, end.stats.generated_tokens) == (reason, None, len(resumed))


def test_a_released_job_leaves_without_an_end() -> None:
    rig = Rig(n_slots=1)
    runs, waits = make_job(job_id="runs"), make_job(job_id="waits")
    rig.submit(runs, waits)
    rig.tick(2)
    assert rig.scheduler.release(runs.lease)
    assert rig.scheduler.release(waits.lease)
    assert rig.finish() == []
    assert rig.engine.sequences.memory == {}


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_last_submitted_attempt_replaces_the_one_before(attempt: int) -> None:
    """A Redis that has lost the claim of the first attempt gives the next one the same number."""
    rig = Rig()
    old = make_job(job_id="j", max_tokens=9)
    rig.submit(old)
    published = tokens_of(rig.tick(4), "j")
    new = make_job(job_id="j", attempt=attempt, resumed=published, max_tokens=9)
    rig.submit(new)
    outputs = rig.finish()
    assert only_end(outputs).job.lease is new.lease
    assert len(published) + len(tokens_of(outputs, "j")) == 9
    assert isinstance(old.sampler, GreedySampler)
    assert old.sampler.closed


def test_a_release_of_one_attempt_does_not_remove_another_one_with_the_same_number() -> None:
    rig = Rig()
    old, new = make_job(job_id="j"), make_job(job_id="j")
    rig.submit(old, new)
    assert not rig.scheduler.release(old.lease)
    assert rig.scheduler.release(new.lease)


def test_withdraw_returns_the_jobs_without_a_slot_and_close_returns_all() -> None:
    rig = Rig(n_slots=1)
    jobs = [make_job(job_id=f"j{number}", max_tokens=5) for number in range(3)]
    rig.submit(*jobs)
    rig.tick()
    assert rig.scheduler.withdraw_waiting() == jobs[1:]
    assert rig.running == ["j0"]
    assert rig.scheduler.withdraw_all() == jobs[:1]
    assert not rig.scheduler.has_work
    assert rig.engine.sequences.memory == {}
    assert all(isinstance(job.sampler, GreedySampler) and job.sampler.closed for job in jobs)


def test_every_sampler_is_closed_when_its_job_leaves() -> None:
    rig = Rig(n_ctx=64)
    rig.engine.fail_job("fails")
    jobs = [make_job(job_id="ends", max_tokens=2), make_job(job_id="fails"), make_job([7] * 99, job_id="too long")]
    rig.submit(*jobs)
    rig.finish()
    assert [job.sampler.closed for job in jobs if isinstance(job.sampler, GreedySampler)] == [1, 1, 1]


# ---- order of admission


def test_interactive_jobs_are_admitted_before_bulk_jobs_and_each_priority_in_order() -> None:
    rig = Rig(n_slots=1)
    rig.submit(*(make_job(job_id=f"b{number}", max_tokens=1, priority="bulk") for number in range(2)))
    rig.submit(*(make_job(job_id=f"i{number}", max_tokens=1) for number in range(2)))
    assert list(ends_of(rig.finish())) == ["i0", "i1", "b0", "b1"]


def test_small_jobs_pass_a_large_one_that_does_not_fit_a_bounded_number_of_times() -> None:
    rig = Rig(n_slots=3, n_ctx=120)
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
    rig = Rig(n_slots=3, n_ctx=100)
    rig.submit(make_job([7] * 10, job_id="first", max_tokens=40))
    rig.submit(make_job([7] * 80, job_id="bulk", max_tokens=10, priority="bulk"))
    rig.tick()
    rig.submit(make_job([7] * 10, job_id="urgent", max_tokens=20))
    rig.tick()
    assert rig.running == ["first", "urgent"]


def test_submitted_jobs_wait_until_the_next_tick_admits_as_many_as_there_are_slots() -> None:
    rig = Rig(n_slots=4)
    assert (rig.scheduler.n_waiting, rig.scheduler.has_work) == (0, False)
    rig.submit(make_job(max_tokens=9), make_job(max_tokens=9))
    assert (rig.scheduler.n_waiting, rig.scheduler.has_work) == (2, True)
    rig.tick()
    assert (rig.scheduler.n_waiting, len(rig.running)) == (0, 2)
    rig.submit(*(make_job(max_tokens=9) for _ in range(5)))
    rig.tick()
    assert (rig.scheduler.n_waiting, len(rig.running)) == (3, 4)


def test_prompts_larger_than_half_the_pool_run_one_after_another() -> None:
    rig = Rig(n_slots=4, n_ctx=100)
    rig.submit(*(make_job([7] * 51, job_id=f"j{number}", max_tokens=30) for number in range(3)))
    outputs = rig.finish()
    assert {end.reason for end in ends_of(outputs).values()} == {FinishReason.LENGTH}
    assert max(len(batch.parts) for batch in rig.engine.batches) == 1


# ---- ticks


def test_a_long_prompt_is_prefilled_in_chunks_between_the_tokens_of_others() -> None:
    rig = Rig(n_slots=2, chunk_size=8)
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
    rig = Rig(chunk_size=4)
    rig.submit(make_job("Hello there", job_id="j", max_tokens=12))
    expected = tokens_of(rig.finish(), "j")

    rig = Rig(chunk_size=4)
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
    rig = Rig()
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
    rig = Rig()
    rig.submit(make_job(max_tokens=9))
    rig.tick(2)
    rig.engine.refuse()
    error = only_end(rig.tick()).error
    assert error is not None
    assert (error.code, "--n-ctx" in error.message) == (ErrorCode.DECODE_FAILED, True)
    assert not rig.scheduler.has_work


def test_a_tick_without_work_gives_an_empty_batch_and_no_output() -> None:
    rig = Rig()
    assert rig.scheduler.plan() == Batch()
    assert rig.tick() == []


def test_a_result_for_a_slot_outside_the_batch_is_a_defect() -> None:
    rig = Rig()
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

    rig = Rig(n_slots=1, strategy=Recording())
    rig.submit(make_job(), make_job(), make_job())
    rig.scheduler.admit()
    rig.scheduler.plan(queue_depth=40)  # the jobs that wait here are among them
    rig.scheduler.plan(queue_depth=0)
    assert depths == [40, 2]


@pytest.mark.parametrize(("budget", "chunk_size", "flag"), [(1, 8, "--n-batch"), (8, 0, "--chunk-size")])
def test_limits_that_no_tick_can_meet_are_refused(budget: int, chunk_size: int, flag: str) -> None:
    with pytest.raises(InvalidSettings, match=flag):
        Rig(n_slots=2, budget=budget, chunk_size=chunk_size)


# ---- views


def test_the_stats_of_a_job_measure_its_attempt() -> None:
    rig = Rig(n_slots=1, chunk_size=8)
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
    rig = Rig(n_slots=1)
    rig.submit(make_job(max_tokens=100), make_job("Hello", job_id="j", queue_ms=5))
    rig.tick()
    rig.clock.now_s += 2
    rig.scheduler.cancel("j")
    assert ends_of(rig.tick())["j"].stats == JobStats(prompt_tokens=6, queue_ms=5, worker="w1")


def test_snapshots_and_repr_show_the_live_state() -> None:
    rig = Rig(n_slots=2, n_ctx=100)
    rig.submit(make_job([7] * 10, job_id="j", max_tokens=20), make_job([7] * 90))
    rig.tick(3)
    first, second = rig.scheduler.snapshot()
    assert (first.state, first.job_id, first.prompt_tokens, first.prefilled_tokens) == ("decode", "j", 10, 10)
    assert first.generated_tokens == 2
    assert second.state == "idle"
    cells = rig.scheduler.cache_snapshot()
    assert (cells.n_cells, cells.reserved_cells, cells.entries) == (100, 20, 0)
    assert repr(rig.scheduler) == "<Scheduler 1/2 slots, 1 waiting>"
