"""Paused and drained queues: what workers claim, and what clients may submit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tests.support.reclaims import reclaim
from tests.support.started_jobs import field
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_suspects import until, until_true, working

from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import AsyncClient, AsyncJob, QueueDraining, QueueMode
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import intake as intake_module
from llamaq.worker.broker import worker_scripts as worker_scripts_module
from llamaq.worker.local.embedded_redis import EmbeddedRedis

NOW_MS = 2**52


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time between two searches of a worker."""
    monkeypatch.setattr(worker_scripts_module, "MOVE_AFTER_S", 0.05)
    monkeypatch.setattr(intake_module, "SEARCH_EVERY_S", 0.05)


async def state_of(job: AsyncJob) -> JobState:
    return (await job.status()).state


async def is_running(job: AsyncJob) -> bool:
    return await state_of(job) is JobState.RUNNING


async def test_a_paused_queue_accepts_jobs_and_starts_none_until_it_is_resumed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, n_slots=2) as worker:
        running = await client.submit("runs")
        await until_true(partial(is_running, running))
        await client.pause()
        waiting = await client.submit("waits")
        depth = await client.queue_depth()
        assert (depth.waiting, depth.running, depth.mode) == (1, 1, QueueMode.PAUSED)
        worker.generate(running)
        worker.end(running)
        assert (await running.result(timeout=10)).tokens == (65,)
        # An interactive job that is read before the mode is checked would have been admitted by now.
        assert list(worker.admitted) == []
        assert await state_of(waiting) is JobState.QUEUED
        await client.resume()
        await until(lambda: waiting.id in worker.admitted)
        assert (await client.queue_depth()).mode is QueueMode.OPEN


async def test_jobs_that_wait_in_a_worker_return_to_a_paused_queue(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=3, n_slots=1) as worker:
        running = await client.submit("runs")
        await until_true(partial(is_running, running))
        waiting = [await client.submit(f"job {number}") for number in range(2)]
        await until(lambda: len(worker.admitted) == 3)
        await client.pause()
        await until(lambda: list(worker.admitted) == [running.id])
        async with working(redis_url, queue, "w2", n_slots=2) as idle:
            worker.end(running)
            await running.result(timeout=10)
            assert list(idle.admitted) == list(worker.admitted) == []
            await client.resume()
            await until(lambda: {*idle.admitted, *worker.admitted} == {job.id for job in waiting})
            assert {(await job.status()).crashes for job in waiting} == {0}


async def test_a_pause_leaves_preempted_jobs_in_their_worker_and_requeues_no_job_again(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        preempted = await client.submit("has lost its slot")
        attempt = await worker.start_next()
        await worker.scripts.flush([replace(attempt.increment(), has_slot=False)], LEASE_MS, renew=True)
        unclaimed = await client.submit("is read, and not claimed")
        assert await worker.claim() is not None
        assert [await state_of(job) for job in (preempted, unclaimed)] == [JobState.QUEUED] * 2
        await client.pause()
        assert (await attempt.emit([1], "a")).code == "ok"
        assert [await field(worker, job.id, "attempt") for job in (preempted, unclaimed)] == [b"1", b"0"]


async def test_an_interrupted_job_continues_in_a_paused_queue_and_others_are_not_taken(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        claimed = await client.submit("claimed, without a slot")
        claim = await worker.claim()
        assert claim is not None
        await worker_scripts(worker).requeue(claim, None)
        interrupted = await client.submit("interrupted")
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        await client.pause()
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        taken = await reclaim(worker, claim.stream, 1, LEASE_MS, trusted_until_ms=NOW_MS)
        assert [fields[b"id"].decode() for _, fields, _ in taken] == [interrupted.id]
        again = await worker.begin(attempt.claim)
        assert again is not None
        assert again.text == "a"
        # A claim that began before the pause requeues the job.
        assert await worker.claim_scripts.claim_job(claim, "late", LEASE_MS) == "paused"
        assert await reclaim(worker, claim.stream, 9, LEASE_MS, trusted_until_ms=NOW_MS) == []
        assert (await claimed.status()).attempt == 0
        await client.resume()
        assert len(await reclaim(worker, claim.stream, 9, LEASE_MS, trusted_until_ms=NOW_MS)) == 1


async def test_an_interrupted_job_keeps_its_priority_in_a_paused_queue_and_continues(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        interrupted = await client.submit("interrupted")
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        retried = await client.submit("retried later", retries=1)
        failed, error = await worker.start_next(), Failed(code="internal", message="broken")
        delay = {"first_delay_s": 1000.0, "max_delay_s": 1000.0, "share": 1.0}
        assert await worker_scripts(worker).retry(failed.increment(), error, **delay) is not None
        new = await client.submit("new")
        await client.pause()
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        assert [await job.set_priority("bulk") for job in (interrupted, retried, new)] == [False, True, True]
        (taken,) = await reclaim(worker, attempt.claim.stream, 9, LEASE_MS, trusted_until_ms=NOW_MS)
        assert taken.fields[b"id"].decode() == interrupted.id
        again = await worker.begin(attempt.claim)
        assert again is not None
        await worker.scripts.flush([replace(again.increment(), has_slot=False)], LEASE_MS, renew=True)
        assert await state_of(interrupted) is JobState.QUEUED
        assert not await interrupted.set_priority("bulk"), "it waits for another slot in its worker"
        await client.resume()
        assert await interrupted.set_priority("bulk")


async def test_a_paused_job_is_cancelled_and_reaches_its_deadline(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue):
        await client.pause()
        cancelled, late = await client.submit("x"), await client.submit("x", queue_timeout_s=0.01)
        assert await cancelled.cancel()
        assert (await cancelled.result(timeout=10)).finish_reason == "cancelled"
        assert (await late.result(timeout=10)).finish_reason == "deadline"


async def test_a_draining_queue_refuses_jobs_and_finishes_those_that_it_has(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        jobs = [await client.submit("x", idempotency_key="key"), await client.submit("x")]
        await client.drain()
        for attempt in (client.submit("y"), client.generate("y"), client.stream("y")):
            with pytest.raises(QueueDraining, match=f"llamaq resume --queue {queue}"):
                await attempt
        assert (await client.submit("x", idempotency_key="key")).id == jobs[0].id
        assert (await client.queue_depth()).mode is QueueMode.DRAINING
        async with working(redis_url, queue) as worker:
            await until(lambda: len(worker.admitted) == 2)
            for job in jobs:
                worker.end(job)
                await job.result(timeout=10)
        assert (await client.queue_depth()).waiting == 0
        await client.resume()
        await client.submit("y")


async def test_the_mode_is_that_of_all_partitions_and_of_the_list_of_queues(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, partitions=3, key_prefix=queue) as client:
        for number in range(9):
            await client.submit(f"job {number}")
        await client.pause()
        modes = [await client.redis.hget(client.keys.config(queue, number), "mode") for number in range(3)]
        assert modes == [b"paused"] * 3
        assert [one.mode for one in await client.queues()] == [QueueMode.PAUSED]
        assert (await client.stats()).depth.mode is QueueMode.PAUSED
        await client.redis.hdel(client.keys.config(queue, 1), "mode")
        assert (await client.queue_depth()).mode is QueueMode.PAUSED, "one partition is open"


async def test_the_mode_of_all_partitions_of_the_workers_is_set(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.hset(client.keys.config(queue, 0), "partitions", "2")
        await client.pause()
        assert await client.redis.hget(client.keys.config(queue, 1), "mode") == b"paused"


@pytest.mark.starts_processes
async def test_a_full_redis_is_paused(queue: str) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client:
            await client.submit("x")
            await client.redis.config_set("maxmemory", 1)
            await client.pause()
            assert (await client.queue_depth()).mode is QueueMode.PAUSED
