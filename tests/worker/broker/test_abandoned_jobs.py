"""Waiting jobs with `cancel_on_disconnect` are cancelled when their clients are gone, before they take a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.job_claims import worker_queue
from tests.support.worker_scripts import worker_scripts

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import Attempt
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import abandoned_jobs
from llamaq.worker.broker.abandoned_jobs import MAX_CHECKS, AbandonedJobs

DISCONNECT_S = 1000.0
MAX_LATE_S = 1000.0
"""Both are much longer than any test takes."""


@pytest.fixture(autouse=True)
def late_checks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abandoned_jobs, "MAX_LATE_S", MAX_LATE_S)


def checks_of(client: AsyncClient) -> AbandonedJobs:
    return AbandonedJobs(worker_queue(client), disconnect_s=DISCONNECT_S, may_have_jobs=lambda _: True)


async def watched(client: AsyncClient) -> dict[str, float]:
    found: Any = await client.redis.zrange(client.keys.watched(client.queue, 0), 0, -1, withscores=True)
    return {job_id.decode(): score for job_id, score in found}


async def alone_ms(client: AsyncClient, job: AsyncJob) -> int | None:
    """Return the time from which checks have found no subscriber of a job, in ms since the epoch."""
    found: Any = await client.redis.hget(client.keys.of_job(job.id).job, "alone_ms")
    return None if found is None else int(found)


async def check(client: AsyncClient, job: AsyncJob, *, late_s: float = 0.0, alone_s: float | None = None) -> None:
    """Check the subscribers of a job.

    Args:
        client: A client of the queue.
        job: The job.
        late_s: How late the check is, in seconds.
        alone_s: How long earlier checks have found no subscriber, in seconds. None: as it is.
    """
    now_ms = await server_time_ms(client.redis)
    await client.redis.zadd(client.keys.watched(client.queue, 0), {job.id: now_ms - int(late_s * 1000)}, xx=True)
    if alone_s is not None:
        await client.redis.hset(client.keys.of_job(job.id).job, "alone_ms", str(now_ms - int(alone_s * 1000)))
    assert await checks_of(client).check(0) == 1


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an awaited condition holds. The test's time limit ends the wait."""
    while not await condition():  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_waiting_job_without_a_subscriber_is_cancelled_after_disconnect_s(
    redis_url: str, queue: str, is_claimed: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hi", cancel_on_disconnect=True)
        if is_claimed:
            claim = await worker.claim()
            assert claim is not None
            assert isinstance(await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS), Attempt)
        before_ms = await server_time_ms(client.redis)
        await check(client, job)
        first_ms = await alone_ms(client, job)
        assert first_ms is not None
        assert first_ms >= before_ms
        await check(client, job, alone_s=DISCONNECT_S / 2)
        assert (await job.status()).state is JobState.QUEUED
        await check(client, job, alone_s=DISCONNECT_S)
        status = await job.status()
        assert (status.state, status.finish_reason) == (JobState.FINISHED, FinishReason.CANCELLED)
        assert status.started_ms is None
        assert await watched(client) == {}
        assert (await client.queue_depth()).waiting == 0


async def test_a_job_is_checked_once_in_a_second_by_all_workers_together(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        took_ms = 1000
        while took_ms >= 1000:  # after a stop of the machine, a second check may be due
            begun_ms = await server_time_ms(client.redis)
            job = await client.submit("hi", cancel_on_disconnect=True)
            n_checked = [await checks_of(client).check(0) for _ in range(3)]
            took_ms = await server_time_ms(client.redis) - begun_ms
            next_ms, since_ms = (await watched(client))[job.id], await alone_ms(client, job)
            await job.cancel()
        assert n_checked == [1, 0, 0]
        assert next_ms == (since_ms or 0) + 1000


@pytest.mark.parametrize("n_jobs", [1, MAX_CHECKS + 1])
async def test_checks_do_not_wait_until_a_clock_that_was_set_back_shows_the_old_time_again(
    redis_url: str, queue: str, n_jobs: int
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        jobs = [await client.submit("hi", cancel_on_disconnect=True) for _ in range(n_jobs)]
        old_ms = await server_time_ms(client.redis) + 3_600_000
        await client.redis.zadd(client.keys.watched(client.queue, 0), {job.id: old_ms for job in jobs})
        await client.redis.hset(client.keys.of_job(jobs[0].id).job, "alone_ms", str(old_ms))
        assert await checks_of(client).check(0) == min(n_jobs, MAX_CHECKS)
        assert await checks_of(client).check(0) == n_jobs - min(n_jobs, MAX_CHECKS)
        now_ms = await server_time_ms(client.redis)
        since_ms = await alone_ms(client, jobs[0])
        assert since_ms is not None
        assert now_ms - 10_000 < since_ms <= now_ms, "the time without a subscriber begins again"
        await check(client, jobs[0], alone_s=DISCONNECT_S)
        assert (await jobs[0].status()).finish_reason is FinishReason.CANCELLED


async def test_a_subscriber_that_comes_back_keeps_the_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hi", cancel_on_disconnect=True)
        await check(client, job)
        reading = asyncio.create_task(job.result())
        channel = client.keys.of_job(job.id).channel

        async def is_read() -> bool:
            return bool((await client.redis.pubsub_numsub(channel))[0][1])

        await until(is_read)
        await check(client, job, alone_s=DISCONNECT_S)
        assert await alone_ms(client, job) is None
        assert (await job.status()).state is JobState.QUEUED
        attempt = await worker.start_next()
        await attempt.finish(text="done", tokens=[1])
        assert (await reading).text == "done"


async def test_the_time_of_an_outage_does_not_count(redis_url: str, queue: str) -> None:
    """During an outage, no worker checks the job, and its subscriber needs some time to reconnect afterwards."""
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("hi", cancel_on_disconnect=True)
        await check(client, job, late_s=2 * MAX_LATE_S, alone_s=2 * DISCONNECT_S)
        assert (await job.status()).state is JobState.QUEUED
        assert (await alone_ms(client, job) or 0) > await server_time_ms(client.redis) - 1000 * DISCONNECT_S
        await check(client, job, alone_s=DISCONNECT_S)
        assert (await job.status()).state is JobState.FINISHED


async def test_a_job_that_has_a_slot_or_is_not_due_is_left_to_others(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        running = await client.submit("hi", cancel_on_disconnect=True)
        attempt = await worker.start_next()
        await check(client, running, alone_s=DISCONNECT_S)
        assert (await running.status()).state is JobState.RUNNING
        assert await alone_ms(client, running) is None
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)  # now it waits again
        await check(client, running, alone_s=DISCONNECT_S)
        assert (await running.status()).finish_reason is FinishReason.CANCELLED
        delayed = await client.submit("hi", cancel_on_disconnect=True, delay_s=1000)
        await check(client, delayed, alone_s=DISCONNECT_S)
        assert (await delayed.status()).state is JobState.QUEUED


async def test_only_open_jobs_with_cancel_on_disconnect_are_watched(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit("hi")
        await (await worker.start_next()).finish()
        assert await watched(client) == {}
        cancelled, finished = [await client.submit("hi", cancel_on_disconnect=True) for _ in range(2)]
        assert set(await watched(client)) == {cancelled.id, finished.id}
        await cancelled.cancel()
        attempt = await worker.start_next()
        assert attempt.claim.job_id == finished.id
        await attempt.finish()
        assert await watched(client) == {}


async def test_ids_of_no_jobs_and_damaged_jobs_do_not_keep_the_check_from_the_jobs_behind_them(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned_jobs, "EVERY_S", 0.01)
    async with AsyncClient(redis_url, queue) as client:
        damaged = str(JobId.new(queue))
        await client.redis.set(client.keys.of_job(damaged).job, "overwritten")
        garbage: dict[Any, float] = {b"\xff" + bytes([number]): 1.0 for number in range(MAX_CHECKS)} | {damaged: 1.0}
        await client.redis.zadd(client.keys.watched(queue, 0), garbage)
        job = await client.submit("hi", cancel_on_disconnect=True)
        checks = AbandonedJobs(worker_queue(client), disconnect_s=0.001, may_have_jobs=lambda _: True)
        task = asyncio.create_task(checks.run())
        while (await job.status()).state is not JobState.FINISHED:
            assert not task.done()
            await asyncio.sleep(0.01)
        assert set(await watched(client)) == {damaged}
        await cancel_tasks(task)
