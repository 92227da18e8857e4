"""When jobs end, and which error ends which job."""

from __future__ import annotations

import pytest
from tests.support.outputs import tokens_of
from tests.support.ticked_jobs import EOS, TickedJobs, ends_of, model_that_generates, only_end, text_of

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.testing import (
    GreedySampler,
    make_job,
)


def test_a_job_ends_with_length_at_max_tokens() -> None:
    rig = TickedJobs()
    job = make_job("Hello", max_tokens=7)
    rig.submit(job)
    outputs = rig.finish()
    assert only_end(outputs).reason is FinishReason.LENGTH
    assert len(tokens_of(outputs, job.id)) == 7
    assert rig.engine.sequences.memory == {}


def test_an_end_token_ends_the_job_and_is_not_part_of_its_text() -> None:
    rig = TickedJobs(next_token=model_that_generates("done", after=6))
    job = make_job("Hello", max_tokens=50)
    rig.submit(job)
    outputs = rig.finish()
    end = only_end(outputs)
    assert end.reason is FinishReason.STOP
    assert bytes(tokens_of(outputs, job.id)) == b"done"
    assert end.stats.generated_tokens == 4


def test_an_end_token_as_first_token_gives_an_empty_result() -> None:
    rig = TickedJobs(next_token=lambda _history: EOS)
    rig.submit(make_job(max_tokens=5))
    end = only_end(rig.finish())
    assert (end.reason, end.stats.generated_tokens, end.stats.ttft_ms) == (FinishReason.STOP, 0, 0.0)


def test_a_token_of_stop_token_ids_ends_its_job_as_an_end_token_does() -> None:
    rig = TickedJobs(next_token=model_that_generates("done", after=6))
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
        rig = TickedJobs(next_token=model_that_generates("done", after=6))
        rig.submit(make_job("Hello", max_tokens=50, stop_token_ids=stop_token_ids))
        assert only_end(rig.finish()).stats.stop_token == stop_token


@pytest.mark.parametrize("resumed", [b"", b"go", b"good EN"])
def test_a_stop_string_within_the_minimum_of_tokens_does_not_end_a_job(resumed: bytes) -> None:
    """The count continues over attempts."""
    rig = TickedJobs(next_token=model_that_generates("good END and the END, at last", after=6))
    job = make_job("Hello", max_tokens=50, stop=["END"], min_tokens=8, resumed=resumed)
    rig.submit(job)
    outputs = rig.finish()
    assert (resumed + bytes(tokens_of(outputs, job.id))) == b"good END and the END"
    assert only_end(outputs).stats.stop_string == "END"


def test_the_text_ends_with_a_stop_string_that_the_job_includes() -> None:
    rig = TickedJobs(next_token=model_that_generates("good END and more", after=6))
    rig.submit(make_job("Hello", max_tokens=50, stop=["END"], include_stop=True))
    outputs = rig.finish()
    assert (text_of(outputs), only_end(outputs).reason) == ("good END", FinishReason.STOP)


def test_a_stop_string_split_over_tokens_ends_the_job_and_is_never_in_the_text() -> None:
    rig = TickedJobs(next_token=model_that_generates("good END and more", after=6))
    rig.submit(make_job("Hello", max_tokens=50, stop=["END"]))
    outputs = rig.finish()
    assert only_end(outputs).reason is FinishReason.STOP
    assert text_of(outputs) == "good "


def test_the_start_of_an_incomplete_stop_string_is_in_the_text_of_the_end() -> None:
    rig = TickedJobs(next_token=model_that_generates("good EN", after=6))
    rig.submit(make_job("Hello", max_tokens=50, stop=["END"]))
    outputs = rig.finish()
    assert only_end(outputs).text == "EN"
    assert text_of(outputs) == "good EN"


def test_a_job_that_reaches_its_context_limit_ends_with_length() -> None:
    rig = TickedJobs()
    job = make_job([7] * 20, max_tokens=100, context_limit=32)
    rig.submit(job)
    outputs = rig.finish()
    assert only_end(outputs).reason is FinishReason.LENGTH
    assert len(tokens_of(outputs, job.id)) == 12


def test_no_context_limit_is_larger_than_the_pool() -> None:
    rig = TickedJobs(n_ctx=64, chunk_size=32)
    rig.submit(make_job([7] * 20, max_tokens=1000, context_limit=10**6))
    outputs = rig.finish()
    assert only_end(outputs).stats.generated_tokens == 44


@pytest.mark.parametrize(("n_prompt", "fails"), [(63, False), (64, True), (5000, True)])
def test_a_prompt_that_fills_the_context_fails_only_its_job_with_both_lengths_in_the_error(
    n_prompt: int, fails: bool
) -> None:
    rig = TickedJobs(n_ctx=64)
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
    rig = TickedJobs()
    rig.submit(make_job([]))
    error = only_end(rig.finish()).error
    assert error is not None
    assert error.code is ErrorCode.INVALID_REQUEST


def test_an_error_of_a_sampler_fails_only_its_job() -> None:
    rig = TickedJobs()
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
    rig = TickedJobs()
    rig.engine.fail_job("bad")
    rig.submit(make_job(job_id="bad"), make_job(job_id="good", max_tokens=3))
    ends = ends_of(rig.finish())
    assert ends["bad"].error is not None
    assert ends["bad"].error.code is ErrorCode.DECODE_FAILED
    assert ends["good"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("ticks", [0, 1, 5])
def test_a_cancelled_job_ends_once_with_the_tokens_it_has(ticks: int) -> None:
    rig = TickedJobs()
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
    rig = TickedJobs()
    assert not rig.scheduler.cancel("unknown")
    assert not rig.scheduler.release(make_job().lease)
    assert not rig.scheduler.has_work


def test_timeout_s_counts_the_time_in_a_slot_over_all_attempts() -> None:
    rig = TickedJobs(n_slots=1)
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
    rig = TickedJobs(n_slots=1)
    rig.submit(make_job(max_tokens=300), make_job(job_id="late", max_tokens=300))
    next(job for job in rig.scheduler._waiting if job.id == "late").times.deadline_s = rig.clock.now_s + 5
    outputs = rig.tick(3)
    rig.clock.now_s += 5
    end = ends_of([*outputs, *rig.tick()])["late"]
    assert (end.reason, end.stats.slot, end.stats.queue_ms) == (FinishReason.DEADLINE, None, 5000)
