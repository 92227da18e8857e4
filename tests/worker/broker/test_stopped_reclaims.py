"""The intake stops, or Redis fails, while the jobs that it has reclaimed from other workers are checked for crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_suspects import FakeEngineWorker, submit_suspect, until, working

from llamaq.common.protocol.script_types import JobEntry
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker import intake as intake_module
from llamaq.worker.broker import suspects as suspects_module
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.worker_scripts import CrashVerdict

LIMIT_S = 10.0


class LateReply:
    """Delays the first replies to a method of `JobClaims` that have taken jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.is_awaited, self.may_arrive = asyncio.Event(), asyncio.Event()
        call = getattr(JobClaims, method)

        async def call_late(claims: JobClaims, *args: Any, **options: Any) -> Any:
            reply = await call(claims, *args, **options)
            if reply:
                self.is_awaited.set()
                await self.may_arrive.wait()
            return reply

        monkeypatch.setattr(JobClaims, method, call_late)


async def submit_requeued(client: AsyncClient, leaving: FakeWorker) -> AsyncJob:
    """Submit a job, and let a worker that leaves requeue it."""
    job = await client.submit("requeued")
    claim = await leaving.claim()
    assert claim is not None
    assert await worker_scripts(leaving).requeue(claim, None)
    return job


async def assert_another_worker_runs(redis_url: str, queue: str, *jobs: AsyncJob) -> None:
    """Check that the jobs are requeued: the leases that expire are not trusted here."""
    async with asyncio.timeout(LIMIT_S), working(redis_url, queue, "w2") as other:
        await until(lambda: {job.id for job in jobs} <= other.admitted.keys())
        assert [(await job.status()).crashes for job in jobs] == [0] * len(jobs)


@pytest.mark.parametrize("method", ["reclaim", "check_crash"])
async def test_jobs_that_an_intake_has_just_reclaimed_are_requeued_when_it_stops(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name="leaving") as leaving:
        jobs = [await submit_requeued(client, leaving) for _ in range(2)]
        async with working(redis_url, queue) as worker:
            with monkeypatch.context() as patch:
                late = LateReply(patch, method)
                await late.is_awaited.wait()
                await worker.stop_intake()
                late.may_arrive.set()
            await assert_another_worker_runs(redis_url, queue, *jobs)
            assert worker.history == []


@pytest.mark.parametrize("method", ["reclaim", "check_crash"])
async def test_a_worker_that_ends_waits_until_the_jobs_that_it_has_just_reclaimed_are_requeued(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name="leaving") as leaving:
        jobs = [await submit_requeued(client, leaving) for _ in range(2)]
        with monkeypatch.context() as patch:
            late = LateReply(patch, method)
            async with working(redis_url, queue):
                await late.is_awaited.wait()
                asyncio.get_running_loop().call_later(0.1, late.may_arrive.set)
        await assert_another_worker_runs(redis_url, queue, *jobs)


async def test_a_suspect_and_the_jobs_beside_it_are_requeued_when_the_intake_stops(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name="leaving") as leaving:
        suspect, job = await submit_suspect(client, leaving), await submit_requeued(client, leaving)
        async with working(redis_url, queue) as worker:
            with monkeypatch.context() as patch:
                late = LateReply(patch, "check_crash")
                await late.is_awaited.wait()
                await worker.stop_intake()
                late.may_arrive.set()
            await assert_the_suspect_runs_elsewhere(redis_url, queue, suspect, worker)
            assert (await job.status()).crashes == 0


async def test_a_suspect_whose_claim_gets_its_reply_after_the_intake_stopped_is_requeued(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name="leaving") as leaving:
        suspect = await submit_suspect(client, leaving)
        async with working(redis_url, queue) as worker:
            with monkeypatch.context() as patch:
                late = LateReply(patch, "claim_job")
                await late.is_awaited.wait()
                await worker.stop_intake()
                late.may_arrive.set()
            await assert_the_suspect_runs_elsewhere(redis_url, queue, suspect, worker)


async def test_a_suspect_that_waits_for_running_jobs_is_requeued_when_the_intake_stops(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(suspects_module, "MAX_SUSPECT_WAIT_S", 60.0)
    monkeypatch.setattr(intake_module, "SEARCH_EVERY_S", 0.1)
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue, name="leaving") as leaving,
        working(redis_url, queue, capacity=2) as worker,
    ):
        running, ending = [await client.submit("running") for _ in range(2)]
        await until(lambda: len(worker.admitted) == 2)
        suspect = await submit_suspect(client, leaving)
        worker.end(ending)
        await until(lambda: worker.outbox.n_stored_tokens(suspect.id) is not None)
        await worker.stop_intake()
        await assert_the_suspect_runs_elsewhere(redis_url, queue, suspect, worker)
        assert list(worker.admitted) == [running.id]
        assert "job.moved_here" not in caplog.text


async def assert_the_suspect_runs_elsewhere(
    redis_url: str, queue: str, suspect: AsyncJob, worker: FakeEngineWorker
) -> None:
    async with asyncio.timeout(LIMIT_S), working(redis_url, queue, "w2") as other:
        await until(lambda: list(other.admitted) == [suspect.id])
        assert suspect.id not in worker.history
        assert (await suspect.status()).crashes == 1, "the one that made it a suspect"


async def test_a_job_whose_crash_check_fails_does_not_delay_the_other_reclaimed_jobs(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name="leaving") as leaving:
        first, unchecked, last = [await submit_requeued(client, leaving) for _ in range(3)]
        refuse_checks(monkeypatch, unchecked)
        async with working(redis_url, queue) as worker, asyncio.timeout(LIMIT_S):
            await until(lambda: worker.admitted.keys() == {first.id, last.id})
    assert f"job.crash_check_failed id={unchecked.id} error=no answer" in caplog.text
    assert "intake.redis_error" not in caplog.text


async def test_an_intake_pauses_when_no_crash_check_succeeds(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name="leaving") as leaving:
        unchecked = await submit_requeued(client, leaving)
        refuse_checks(monkeypatch, unchecked)
        async with working(redis_url, queue) as worker, asyncio.timeout(LIMIT_S):
            await until(lambda: "intake.redis_error" in caplog.text)
            new = await client.submit("new")
            await until(lambda: list(worker.admitted) == [new.id])


def refuse_checks(monkeypatch: pytest.MonkeyPatch, job: AsyncJob) -> None:
    """Let the checks of one job fail."""
    check = JobClaims.check_crash

    async def check_or_fail(claims: JobClaims, entry: JobEntry) -> CrashVerdict:
        if entry.job_id == job.id:
            raise RedisConnectionError("no answer")
        return await check(claims, entry)

    monkeypatch.setattr(JobClaims, "check_crash", check_or_fail)
