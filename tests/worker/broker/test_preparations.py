"""Quick jobs are prepared at once, others on other threads, and a slow one delays no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
from tests.worker.broker.test_suspects import BytePreparer, until, working

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.script_types import Attempt, JobEntry
from llamaq.producer import AsyncClient, JobFailed
from llamaq.worker.broker import preparations as preparations_module
from llamaq.worker.broker.job_claims import ClaimedJob
from llamaq.worker.broker.job_starts import JobStarts
from llamaq.worker.broker.preparations import N_THREADS, N_THREADS_OF_KIND, Preparation, PreparationPanic, Preparations
from llamaq.worker.broker.published_output import NO_OUTPUT
from llamaq.worker.broker.read_order import ReadOrder
from llamaq.worker.core.job import BaseJob, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.testing import make_job


class Panic(BaseException):
    """What a panic of a library in Rust is in Python: no `Exception`."""


class NamedPreparer:
    """Prepares jobs whose request is their name. The job `slow` is prepared when its event is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.closed: list[str] = []

    def is_quick(self, payload: bytes) -> bool:
        return payload.startswith(b"quick")

    def may_have_grammar(self, payload: bytes) -> bool:
        return payload.startswith(b"grammar")

    def prepare(self, payload: bytes, lease: Lease, published: TokenSpan, times: JobTimes) -> PreparedJob:
        if payload in (b"slow", b"grammar slow"):
            assert self.may_end.wait(timeout=60)
        if payload == b"wrong":
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, "no root")
        if payload == b"crash":
            raise ZeroDivisionError
        if payload.endswith(b"panic"):
            raise Panic("index out of bounds")
        if payload.endswith(b"exit"):
            raise SystemExit(3)
        if payload.endswith(b"interrupt"):
            raise KeyboardInterrupt
        job = make_job("x", job_id=lease.job_id)
        job.sampler.close = lambda: self.closed.append(lease.job_id)  # type: ignore[method-assign]
        return PreparedJob(job, [], finish_preparation=self.finish if payload.endswith(b"unfinished") else None)

    def finish(self) -> None:
        assert self.may_end.wait(timeout=60)


def preparations_of(*names: str) -> list[Preparation]:
    order, found = ReadOrder(), []
    for name in names:
        attempt = Attempt(1, name.encode(), 0, 0.0, None, 0.0, None, None)
        claimed = ClaimedJob(JobEntry(name, "s", "1-1"), attempt, NO_OUTPUT, JobTimes())
        found.append(Preparation(claimed, Lease(name, 0, "s", "1-1", 1), order.enter(Priority.BULK)))
    return found


async def test_jobs_are_handed_over_in_groups_while_one_of_them_is_slow() -> None:
    groups: list[list[str]] = []

    def receive(ready: Sequence[Preparation]) -> None:
        groups.append([one.lease.job_id for one in ready])

    preparer, names = NamedPreparer(), [f"job {number}" for number in range(50)]
    with ThreadPoolExecutor(N_THREADS) as executor:
        preparations = Preparations(preparer, executor, receive)
        preparations.add(preparations_of("slow", *names))
        await until(lambda: list(chain.from_iterable(groups)) == names)
        assert repr(preparations) == "<Preparations waiting=0 ready=0>"
        preparer.may_end.set()
        await until(lambda: list(chain.from_iterable(groups)) == [*names, "slow"])


async def test_slow_grammars_delay_only_other_grammars() -> None:
    ready: list[Preparation] = []

    def names() -> list[str]:
        return [one.lease.job_id for one in ready]

    preparer = NamedPreparer()
    with ThreadPoolExecutor(N_THREADS) as executor:
        preparations = Preparations(preparer, executor, ready.extend)
        preparations.add(preparations_of(*["grammar slow"] * N_THREADS, "grammar", "plain 1"))
        await until(lambda: names() == ["plain 1"])
        preparations.add(preparations_of("plain 2"))
        await until(lambda: names() == ["plain 1", "plain 2"])
        assert preparations._n_grammar_threads == N_THREADS_OF_KIND
        assert repr(preparations) == "<Preparations waiting=2 ready=0>"
        preparer.may_end.set()
        await until(lambda: len(ready) == N_THREADS + 3)
        await until(lambda: (preparations._n_threads, preparations._n_grammar_threads) == (0, 0))


async def test_a_job_is_handed_over_before_the_rest_of_its_preparation() -> None:
    ready: list[Preparation] = []
    preparer = NamedPreparer()
    with ThreadPoolExecutor(N_THREADS) as executor:
        preparations = Preparations(preparer, executor, ready.extend)
        preparations.add(preparations_of(*["grammar unfinished"] * (N_THREADS_OF_KIND + 1), "plain"))
        await until(lambda: len(ready) == N_THREADS_OF_KIND + 1)
        assert preparations._n_grammar_threads == N_THREADS_OF_KIND, "so that no more of them begin"
        preparer.may_end.set()
        await until(lambda: len(ready) == N_THREADS_OF_KIND + 2)
        await until(lambda: (preparations._n_threads, preparations._n_grammar_threads) == (0, 0))


async def test_quick_jobs_are_handed_over_at_once_and_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations_module, "QUICK_S", 60.0)  # a busy machine may stop this process for a while
    ready: list[Preparation] = []
    executor = Mock(spec=ThreadPoolExecutor)
    preparations = Preparations(NamedPreparer(), executor, ready.extend)
    added = preparations_of("quick 1", "quick 2")
    preparations.add(added)
    assert ready == added
    assert all(isinstance(one.outcome, PreparedJob) for one in ready)
    executor.submit.assert_not_called()
    interrupted = preparations_of("quick but with output")
    interrupted[0].claimed = replace(
        interrupted[0].claimed, attempt=replace(interrupted[0].claimed.attempt, generated=1)
    )
    preparations.add(interrupted)
    assert ready == added, "the output of an interrupted job may be long"
    executor.submit.assert_called_once()


async def test_many_quick_jobs_do_not_hold_the_io_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations_module, "QUICK_S", 0.0)
    ready: list[Preparation] = []
    with ThreadPoolExecutor(N_THREADS) as executor:
        preparations = Preparations(NamedPreparer(), executor, ready.extend)
        preparations.add(preparations_of("quick 1", "quick 2"))
        assert not ready
        await until(lambda: len(ready) == 2)


async def test_the_error_of_a_preparation_is_its_outcome() -> None:
    outcomes: list[Any] = []
    with ThreadPoolExecutor(N_THREADS) as executor:
        preparations = Preparations(
            NamedPreparer(), executor, lambda ready: outcomes.extend(one.outcome for one in ready)
        )
        preparations.add(preparations_of("wrong"))
        await until(lambda: len(outcomes) == 1)
        preparations.add(preparations_of("crash", "sound"))
        await until(lambda: len(outcomes) == 3)
    assert isinstance(outcomes[0], JobRejected)
    assert {type(outcome) for outcome in outcomes[1:]} == {ZeroDivisionError, PreparedJob}


async def test_a_panic_affects_its_job_alone_and_takes_no_thread_from_later_jobs() -> None:
    ready: list[Preparation] = []
    wrong = ["panic", "exit", "interrupt"] * (N_THREADS + 1)
    with ThreadPoolExecutor(N_THREADS) as executor:
        preparations = Preparations(NamedPreparer(), executor, ready.extend)
        for count, name in enumerate(wrong, 1):  # one after the other, so that each needs a thread
            preparations.add(preparations_of(name))
            await until(lambda count=count: len(ready) == count)  # type: ignore[misc]
            await until(lambda: preparations._n_threads == 0)
        preparations.add(preparations_of("sound"))
        await until(lambda: len(ready) == len(wrong) + 1)
    *panics, sound = (one.outcome for one in ready)
    assert all(isinstance(one, PreparationPanic) for one in panics)
    assert {type(one.__cause__) for one in panics if isinstance(one, PreparationPanic)} == {
        Panic,
        SystemExit,
        KeyboardInterrupt,
    }
    assert isinstance(sound, PreparedJob)


async def test_a_job_whose_preparation_panics_fails_and_the_worker_runs_other_jobs(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare = BytePreparer.prepare

    def prepare_or_panic(self: BytePreparer, payload: bytes, *arguments: Any) -> PreparedJob:
        if b"panic" in payload:
            raise Panic("index out of bounds")
        return prepare(self, payload, *arguments)

    monkeypatch.setattr(BytePreparer, "prepare", prepare_or_panic)
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, n_threads=N_THREADS) as worker:
        for _ in range(N_THREADS + 1):
            job = await client.submit("panic")
            with pytest.raises(JobFailed, match="could not prepare this job") as caught:
                await job.result(timeout=30)
            assert caught.value.code == ErrorCode.INTERNAL
        fine = await client.submit("fine")
        await until(lambda: fine.id in worker.admitted)
    assert "Panic: index out of bounds" in caplog.text


async def test_a_panic_of_a_quick_job_affects_this_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations_module, "QUICK_S", 60.0)
    ready: list[Preparation] = []
    preparations = Preparations(NamedPreparer(), Mock(spec=ThreadPoolExecutor), ready.extend)
    preparations.add(preparations_of("quick panic", "quick exit", "quick and sound"))
    assert [type(one.outcome) for one in ready] == [PreparationPanic, PreparationPanic, PreparedJob]


async def test_ctrl_c_is_not_the_outcome_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations_module, "QUICK_S", 60.0)
    preparations = Preparations(NamedPreparer(), Mock(spec=ThreadPoolExecutor), lambda _: pytest.fail("handed over"))
    with pytest.raises(KeyboardInterrupt):
        preparations.add(preparations_of("quick interrupt"))


async def test_a_job_that_is_prepared_after_the_close_is_freed_and_not_handed_over() -> None:
    preparer, handed_over = NamedPreparer(), list[Preparation]()
    with ThreadPoolExecutor(1) as executor:
        preparations = Preparations(preparer, executor, handed_over.extend)
        preparations.add(preparations_of("slow", "never begun"))
        await until(lambda: preparations._waiting[0].lease.job_id == "never begun")
        preparations.close()
        preparer.may_end.set()
        await until(lambda: preparer.closed == ["slow"])
    await asyncio.sleep(0)
    assert preparer.closed == ["slow"]
    assert not handed_over


async def test_a_job_whose_lease_was_lost_while_it_was_prepared_is_freed() -> None:
    outbox, preparer = Mock(n_claimed=0), NamedPreparer()
    outbox.set_prepared = lambda prepared: prepared.job.id == "kept"
    admitted: list[BaseJob] = []
    with ThreadPoolExecutor(1) as executor:
        starts = JobStarts(Mock(), outbox, preparer, executor, admitted.extend, n_slots=2)
        starts._preparations.add(preparations_of("lost", "kept"))
        await until(lambda: [job.id for job in admitted] == ["kept"])
    assert preparer.closed == ["lost"]
