"""Jobs that come from another attempt, leave for another attempt, or are withdrawn."""

from __future__ import annotations

import pytest
from tests.support.outputs import tokens_of
from tests.support.ticked_jobs import EOS, TickedJobs, ends_of, only_end

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.testing import (
    GreedySampler,
    make_job,
)


def test_a_resumed_job_continues_at_the_next_token() -> None:
    whole = TickedJobs()
    whole.submit(make_job(job_id="j", max_tokens=12))
    tokens = tokens_of(whole.finish(), "j")

    rig = TickedJobs()
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
    rig = TickedJobs(n_slots=1)
    rig.submit(make_job(max_tokens=20))
    rig.tick()
    rig.submit(make_job("Hello", job_id="done", resumed=list(resumed), **params))  # type: ignore[arg-type]
    end = ends_of(rig.tick())["done"]
    assert (end.reason, end.stats.slot, end.stats.generated_tokens) == (reason, None, len(resumed))


def test_a_released_job_leaves_without_an_end() -> None:
    rig = TickedJobs(n_slots=1)
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
    rig = TickedJobs()
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
    rig = TickedJobs()
    old, new = make_job(job_id="j"), make_job(job_id="j")
    rig.submit(old, new)
    assert not rig.scheduler.release(old.lease)
    assert rig.scheduler.release(new.lease)


def test_withdraw_returns_the_jobs_without_a_slot_and_close_returns_all() -> None:
    rig = TickedJobs(n_slots=1)
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
    rig = TickedJobs(n_ctx=64)
    rig.engine.fail_job("fails")
    jobs = [make_job(job_id="ends", max_tokens=2), make_job(job_id="fails"), make_job([7] * 99, job_id="too long")]
    rig.submit(*jobs)
    rig.finish()
    assert [job.sampler.closed for job in jobs if isinstance(job.sampler, GreedySampler)] == [1, 1, 1]
