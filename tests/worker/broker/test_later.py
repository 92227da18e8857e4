"""Jobs for later: they wait outside of the job stream until they are due, and every worker gives them their entries."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.support.job_claims import worker_queue

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.script_types import Attempt, DueJobs
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, AsyncJob, QueueFull
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker.deadline_sweep import DeadlineSweep
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts


def ignore(partition: int, due: DueJobs, waited_s: float) -> None:
    """Ignore the reply."""


async def sweep(worker: FakeWorker) -> int:
    return await DeadlineSweep(worker_queue(worker), on_reply=ignore).handle_due(0)


async def sweep_until_due(worker: FakeWorker) -> None:
    while not await sweep(worker):  # noqa: ASYNC110  # the clock of Redis decides
        await asyncio.sleep(0.01)


async def sweep_until_ended(worker: FakeWorker, job: AsyncJob) -> None:
    while (await job.status()).finished_ms is None:
        await sweep(worker)


async def counts(client: AsyncClient) -> tuple[int, int, int]:
    depth = await client.queue_depth()
    return depth.waiting, depth.running, depth.delayed


async def make_due(client: AsyncClient, job: AsyncJob) -> None:
    """Let the time of a job for later come."""
    await client.redis.hset(client.keys.of_job(job.id).job, "run_at_ms", "1")
    await client.redis.zadd(client.keys.later(client.queue, 0), {job.id: 1})


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.BULK])
@pytest.mark.parametrize("option", ["delay_s", "run_at", "text"])
async def test_a_job_for_later_has_no_entry_until_it_is_due(
    redis_url: str, queue: str, option: str, priority: Priority
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        now_s = await server_time_ms(client.redis) / 1000
        due = datetime.fromtimestamp(now_s + 1000, UTC)
        value = {"delay_s": 1000, "run_at": due, "text": due.isoformat()}[option]
        options: Any = {"delay_s" if option == "delay_s" else "run_at": value}
        job = await client.submit("x", priority=priority, **options)
        run_at_ms = (await job.status()).run_at_ms
        assert run_at_ms is not None
        assert run_at_ms / 1000 == pytest.approx(now_s + 1000, abs=30)
        assert await counts(client) == (0, 0, 1)
        assert await sweep(worker) == 0
        assert await worker.claim() is None
        await make_due(client, job)
        assert await sweep(worker) == 1
        assert await counts(client) == (1, 0, 0)
        assert (await job.status()).run_at_ms is None
        attempt = await worker.start_next()
        assert attempt.claim.stream == client.keys.jobs(queue, 0, priority)
        await attempt.finish()
        assert (await job.result(timeout=60)).finish_reason is FinishReason.STOP


async def test_the_wait_counts_from_the_time_for_which_a_job_was_submitted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", delay_s=0.2)
        submitted_ms = (await job.status()).submitted_ms or 0
        await sweep_until_due(worker)
        claim = await worker.claim()
        assert claim is not None
        claimed = await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
        assert isinstance(claimed, Attempt)
        waited_ms = await server_time_ms(client.redis) - submitted_ms - 200
        assert 0 <= claimed.waited_ms <= waited_ms


async def test_a_job_for_later_whose_time_was_damaged_is_due_now(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        found, lost = [await client.submit("x", delay_s=1000) for _ in range(2)]
        for job in (found, lost):
            await client.redis.hset(client.keys.of_job(job.id).job, "run_at_ms", "tomorrow")
        later = client.keys.later(queue, 0)
        await client.redis.zadd(later, {found.id: 1})
        assert await sweep(worker) == 1
        await client.redis.zrem(later, lost.id)
        upkeep = UpkeepScripts(worker_queue(worker))
        assert await upkeep.sweep(0, [], pause_s=0, n_keys=10**6) == [lost.id]
        assert await sweep(worker) == 1
        assert await counts(client) == (2, 0, 0)


async def test_a_time_in_the_past_is_now(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("x", run_at=1.5)
        assert (await job.status()).run_at_ms is None
        assert await counts(client) == (1, 0, 0)


async def test_a_client_that_waits_for_a_job_lets_it_wait_in_the_queue_when_it_is_due(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        waiting = asyncio.create_task(client.generate("x", delay_s=0.1, timeout=20))
        attempt = await worker.start_next()
        await attempt.finish(tokens=[1], text="a")
        assert (await waiting).text == "a"


async def test_the_depth_counts_a_due_job_as_waiting_before_a_script_has_seen_it(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("x", delay_s=1000)
        assert await counts(client) == (0, 0, 1)
        await make_due(client, job)
        assert await counts(client) == (1, 0, 0)


async def test_a_job_for_later_is_cancelled_listed_and_purged_like_a_waiting_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        cancelled, purged, bulk = [
            await client.submit("x", delay_s=1000, priority=priority)
            for priority in (Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BULK)
        ]
        assert await cancelled.cancel()
        assert (await cancelled.result(timeout=60)).finish_reason is FinishReason.CANCELLED
        listed = await client.jobs()
        assert [(job.job_id, job.state) for job in listed] == [(one.id, JobState.QUEUED) for one in (purged, bulk)]
        assert all(job.run_at_ms is not None for job in listed)
        assert [queue.delayed for queue in await client.queues() if queue.queue == client.queue] == [2]
        assert await client.purge(priority=Priority.INTERACTIVE) == (purged.id,)
        assert await counts(client) == (0, 0, 1)
        assert await client.redis.zrange(client.keys.later(queue, 0), 0, -1) == [bulk.id.encode()]


async def test_queue_timeout_s_counts_from_the_due_time_and_deadline_s_from_submit(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        patient = await client.submit("x", delay_s=0.3, queue_timeout_s=0.2)
        late = await client.submit("x", delay_s=1000, deadline_s=0.05)
        await sweep_until_ended(worker, late)
        assert (await late.result(timeout=60)).finish_reason is FinishReason.DEADLINE
        assert (await late.result(timeout=60)).stats.queue_ms == 0
        submitted_ms = (await patient.status()).submitted_ms or 0
        await sweep_until_ended(worker, patient)
        assert ((await patient.status()).finished_ms or 0) >= submitted_ms + 500
        assert await client.redis.zcard(client.keys.deadlines(queue, 0)) == 0


async def test_max_queue_counts_jobs_for_later(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.hset(client.keys.config(queue, 0), "max_queue", "2")
        for _ in range(2):
            await client.submit("x", delay_s=1000)
        with pytest.raises(QueueFull):
            await client.submit("x")


async def test_the_search_for_lost_jobs_leaves_jobs_for_later_and_puts_them_back_if_they_are_forgotten(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("x", delay_s=1000)
        upkeep = UpkeepScripts(worker_queue(client))
        assert await upkeep.sweep(0, [], pause_s=0, n_keys=10**6) == []
        assert await counts(client) == (0, 0, 1)
        await client.redis.delete(client.keys.later(queue, 0))
        assert await upkeep.sweep(0, [], pause_s=0, n_keys=10**6) == [job.id]
        assert await counts(client) == (0, 0, 1)


async def test_due_ids_that_are_no_jobs_are_dropped(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        later = client.keys.later(queue, 0)
        await client.redis.zadd(later, {"nonsense:1": 1, "nonsense": 2})
        job = await client.submit("x", delay_s=0.01)
        await sweep_until_due(worker)
        assert await client.redis.zcard(later) == 0
        assert await counts(client) == (1, 0, 0)
        assert (await job.status()).state is JobState.QUEUED


async def test_times_that_are_ambiguous_are_refused(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        with pytest.raises(InvalidRequest, match="run_at: a time without a time zone is ambiguous"):
            await client.submit("x", run_at=datetime(2030, 1, 1))  # noqa: DTZ001
        with pytest.raises(InvalidRequest, match="run_at"):
            await client.submit("x", run_at="tomorrow")
        with pytest.raises(InvalidRequest, match="delay_s and run_at exclude each other"):
            await client.submit("x", run_at=5, delay_s=1)
