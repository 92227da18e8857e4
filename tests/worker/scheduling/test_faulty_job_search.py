"""A job whose cells are not numbers fails, and no other job does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.outputs import tokens_of
from tests.support.prefix_cache_rig import leave, run_all, run_an_unrelated_job, scheduler_with
from tests.support.ticked_jobs import TickedJobs, ends_of

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.finish_rules import ALL_NAN
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import Output
from llamaq.worker.testing import make_job, next_letter, run_tick, run_to_end

SHARED = range(64)


def letters_after(prompt: Sequence[int], n: int) -> list[int]:
    history = list(prompt)
    for _ in range(n):
        history.append(next_letter(history))
    return history[len(prompt) :]


def search_while_the_faulty_job_computes_alone() -> tuple[TickedJobs, Job, list[Job], list[Output]]:
    """Return the jobs of a search, the faulty one of them first, and the outputs so far."""
    rig = TickedJobs(n_slots=3)
    faulty, *others = [make_job("the prompt of a job " * 2 + str(number), max_tokens=30) for number in range(3)]
    rig.submit(faulty, *others)
    outputs = rig.tick(12)
    rig.engine.spoil_cells(faulty.id)
    outputs += rig.tick(2)
    assert [part.slot.active.job for part in rig.engine.batches[-1].parts] == [faulty]
    return rig, faulty, others, outputs


def assert_unchanged(outputs: list[Output], jobs: Sequence[Job]) -> None:
    for job in jobs:
        assert tokens_of(outputs, job.id) == letters_after(job.prompt, 30)


def assert_only_the_faulty_job_fails(outputs: list[Output], faulty: Job, others: Sequence[Job]) -> None:
    ends = ends_of(outputs)
    error = ends[faulty.id].error
    assert error is not None
    assert error.code is ErrorCode.DECODE_FAILED
    assert error.message == ALL_NAN
    for job in others:
        assert ends[job.id].reason is FinishReason.LENGTH
        assert tokens_of(outputs, job.id) == letters_after(job.prompt, 30)


@pytest.mark.parametrize("prompt", ["four", "a prompt that takes several ticks to compute"])
@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_the_jobs_beside_a_faulty_one_continue_with_the_same_text(prompt: str, n_slots: int) -> None:
    rig = TickedJobs(n_slots=n_slots)
    others = [make_job(f"job number {number}", max_tokens=30) for number in range(3)]
    faulty, later = make_job(prompt, max_tokens=30), make_job("later", max_tokens=30)
    rig.engine.spoil_cells(faulty.id)
    rig.submit(*others[:2])
    outputs = rig.tick(5)
    rig.submit(faulty, others[2])
    outputs += rig.tick(7)
    rig.submit(later)
    outputs += rig.finish()
    assert_only_the_faulty_job_fails(outputs, faulty, [*others, later])
    assert not rig.engine.sequences.is_spoiled


def test_a_job_becomes_faulty_while_it_generates() -> None:
    rig = TickedJobs(n_slots=3)
    faulty, *others = [make_job(f"job number {number}", max_tokens=30) for number in range(3)]
    rig.submit(faulty, *others)
    outputs = rig.tick(9)
    rig.engine.spoil_cells(faulty.id)
    outputs += rig.finish()
    assert_only_the_faulty_job_fails(outputs, faulty, others)
    assert 0 < len(tokens_of(outputs, faulty.id)) < 9


def test_each_of_several_faulty_jobs_fails() -> None:
    rig = TickedJobs(n_slots=4)
    jobs = [make_job(f"job number {number}", max_tokens=30) for number in range(5)]
    for faulty in jobs[1:4:2]:
        rig.engine.spoil_cells(faulty.id)
    rig.submit(*jobs)
    outputs = rig.finish()
    for faulty in jobs[1:4:2]:
        assert_only_the_faulty_job_fails(outputs, faulty, jobs[::2])


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_the_search_continues_without_a_job_that_leaves(how: str) -> None:
    rig = TickedJobs(n_slots=3)
    first, *others = [make_job("the prompt of a job " * 2 + str(number), max_tokens=30) for number in range(3)]
    rig.submit(first, *others)
    outputs = rig.tick(12)
    rig.engine.sequences.is_spoiled = True
    outputs += rig.tick(2)  # the first job computes its prompt alone
    assert len(rig.engine.batches[-1].parts) == 1
    leave(rig.scheduler, first, how)
    outputs += rig.finish()
    assert_unchanged(outputs, others)


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_no_other_job_is_blamed_if_the_faulty_one_leaves_while_it_computes_alone(how: str) -> None:
    rig, faulty, others, outputs = search_while_the_faulty_job_computes_alone()
    leave(rig.scheduler, faulty, how)
    outputs += rig.finish()
    assert_unchanged(outputs, others)


def test_no_other_job_is_blamed_if_the_faulty_one_fails_otherwise_while_it_computes_alone() -> None:
    rig, faulty, others, outputs = search_while_the_faulty_job_computes_alone()
    rig.engine.fail_job(faulty.id)
    outputs += rig.finish()
    assert ends_of(outputs)[faulty.id].error is not None
    assert_unchanged(outputs, others)


def test_the_jobs_that_are_not_the_cause_are_suspected_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = TickedJobs(n_slots=3)
    *others, faulty = [make_job(f"job number {number}", max_tokens=30) for number in range(3)]
    rig.submit(*others, faulty)
    outputs = rig.tick(12)
    rig.engine.spoil_cells(faulty.id)
    outputs += rig.finish()
    assert_only_the_faulty_job_fails(outputs, faulty, others)
    assert caplog.text.count("cache.cleared") == 1


def test_no_job_is_admitted_during_a_search() -> None:
    rig = TickedJobs(n_slots=3)
    first, second, late = (make_job(f"job number {number}", max_tokens=30) for number in range(3))
    rig.submit(first, second)
    outputs = rig.tick(12)
    rig.engine.sequences.is_spoiled = True
    outputs += rig.tick()
    rig.submit(late)
    outputs += rig.tick()
    assert [snapshot.job_id for snapshot in rig.scheduler.snapshot()] == [first.id, second.id, None]
    outputs += rig.finish()
    assert_unchanged(outputs, [first, second, late])


def test_entries_of_the_prefix_cache_are_removed() -> None:
    scheduler, engine = scheduler_with()
    run_all(scheduler, engine, make_job(SHARED, max_tokens=2))
    engine.sequences.is_spoiled = True  # as by a job that was cancelled while its prompt was computed
    job = make_job([*SHARED, 2], max_tokens=9)
    end = run_all(scheduler, engine, job)[job.id]
    assert (end.reason, end.stats.prefix_cache_tokens) == (FinishReason.LENGTH, 0)
    assert scheduler.cache_snapshot().entries == 1


def test_a_job_that_has_loaded_blocks_with_such_cells_computes_its_tokens_and_discards_the_blocks() -> None:
    scheduler, engine = scheduler_with(host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job(SHARED, max_tokens=2))
    run_an_unrelated_job(scheduler, engine)  # the entry is saved in host memory
    job = make_job([*SHARED, 2], max_tokens=9)
    scheduler.submit(job)
    while not any(name == "load" for name, *_ in engine.sequences.calls):
        run_tick(scheduler, engine)
    stored_bytes = scheduler.cache_snapshot().host_bytes
    engine.sequences.is_spoiled = True
    outputs = run_to_end(scheduler, engine)
    end = ends_of(outputs)[job.id]
    assert (end.reason, end.stats.prefix_cache_tokens) == (FinishReason.LENGTH, 0)
    assert tokens_of(outputs, job.id) == letters_after(job.prompt, 9)
    assert scheduler.cache_snapshot().host_bytes < stored_bytes
