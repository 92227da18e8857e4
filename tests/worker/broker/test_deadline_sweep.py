"""Jobs end at their deadlines: a worker of the queue ends them, or a client that waits for the job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.support.job_claims import worker_queue
from tests.support.worker_scripts import worker_scripts

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.end_expired_jobs import MAX_DUE
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import Attempt, DueJobs
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker.deadline_sweep import DeadlineSweep
from llamaq.worker.broker.worker_queue import WorkerQueue


def ignore(partition: int, due: DueJobs, waited_s: float) -> None:
    """Ignore the reply."""


async def sweep_until_due(worker: FakeWorker) -> None:
    """Sweep until a job is due."""
    sweep = DeadlineSweep(worker_queue(worker), on_reply=ignore)
    while not await sweep.handle_due(0):  # noqa: ASYNC110  # the clock of Redis decides
        await asyncio.sleep(0.01)


async def deadlines(client: AsyncClient) -> dict[str, float]:
    found: Any = await client.redis.zrange(client.keys.deadlines(client.queue, 0), 0, -1, withscores=True)
    return {job_id.decode(): score for job_id, score in found}


DEADLINE_FIELDS = {"queue_timeout_s": "queue_deadline_ms", "deadline_s": "deadline_ms"}


async def be_due_in(client: AsyncClient, job: AsyncJob, option: str, seconds: float) -> None:
    """Let a deadline of a job pass after some seconds, and not while the test prepares the job."""
    due_ms = await server_time_ms(client.redis) + int(seconds * 1000)
    await client.redis.hset(client.keys.of_job(job.id).job, DEADLINE_FIELDS[option], str(due_ms))
    await client.redis.zadd(client.keys.deadlines(client.queue, 0), {job.id: due_ms}, xx=True)


@pytest.mark.parametrize("option", ["queue_timeout_s", "deadline_s"])
@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_job_that_waits_too_long_ends_without_a_start(
    redis_url: str, queue: str, option: str, is_claimed: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("late", **{option: 1000})  # type: ignore[arg-type]
        if is_claimed:
            claim = await worker.claim()
            assert claim is not None
            assert isinstance(await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS), Attempt)
        await be_due_in(client, job, option, 0.05)
        await sweep_until_due(worker)
        result = await job.result(timeout=60)
        assert (result.finish_reason, result.tokens) == (FinishReason.DEADLINE, ())
        assert result.stats.queue_ms >= 50
        assert (await job.status()).started_ms is None
        assert await deadlines(client) == {}


async def test_a_client_can_end_a_job_that_waits_too_long_without_any_worker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("late", queue_timeout_s=0.05)
        while await JobScripts(worker.redis, worker.keys).expire(job.id) != "ended":  # noqa: ASYNC110  # the clock of Redis decides
            await asyncio.sleep(0.01)
        assert (await job.result(timeout=60)).finish_reason is FinishReason.DEADLINE
        assert await JobScripts(worker.redis, worker.keys).expire(job.id) == "none"
        assert await JobScripts(worker.redis, worker.keys).expire(str(JobId.new(queue))) == "none"


async def test_queue_timeout_s_does_not_end_a_job_that_had_a_slot(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("in time", queue_timeout_s=1000)
        attempt = await worker.start_next()
        assert await deadlines(client) == {}
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        await be_due_in(client, job, "queue_timeout_s", -0.01)
        assert await JobScripts(worker.redis, worker.keys).expire(job.id) == "none"
        assert (await job.status()).state is JobState.QUEUED


async def test_deadline_s_ends_a_job_whose_worker_does_not_answer_with_the_tokens_so_far(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("slow", deadline_s=1000)
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "ab")
        await be_due_in(client, job, "deadline_s", 0)
        await sweep_until_due(worker)
        result = await job.result(timeout=60)
        assert (result.finish_reason, result.tokens, result.text) == (FinishReason.DEADLINE, (1, 2), "ab")
        assert (await attempt.emit([3], "c")).code == "lost"
        assert (await client.queue_depth()).running == 0


async def test_the_sweep_ends_the_due_jobs_of_all_partitions_and_drops_ids_that_are_no_jobs(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue, partitions=3) as client, FakeWorker(redis_url, queue) as worker:
        redis: Redis = worker.redis
        await redis.zadd(client.keys.deadlines(queue, 0), {"nonsense": 1, str(JobId.new(queue)): 1})
        jobs: list[AsyncJob] = [await client.submit("late", queue_timeout_s=0.01) for _ in range(9)]
        task = asyncio.create_task(DeadlineSweep(WorkerQueue(redis, client.keys, queue, 3), on_reply=ignore).run())
        for job in jobs:
            assert (await job.result(timeout=10)).finish_reason is FinishReason.DEADLINE
        while await deadlines(client):  # noqa: ASYNC110  # the sweep empties it
            await asyncio.sleep(0.01)
        await cancel_tasks(task)


async def test_ids_that_another_client_wrote_do_not_keep_the_sweep_from_the_jobs_behind_them(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        redis: Redis = worker.redis
        garbage: dict[Any, float] = {b"\xff\xfe" + bytes([number]): 1.0 for number in range(MAX_DUE)}
        garbage |= {str(JobId.new(queue, 2, "b")): 1.0, str(JobId.new(f"{queue}-other")): 1.0}
        for key in (client.keys.deadlines(queue, 0), client.keys.later(queue, 0)):
            await redis.zadd(key, garbage)
        late = await client.submit("late", queue_timeout_s=0.01)
        delayed = await client.submit("delayed", delay_s=0.01)
        task = asyncio.create_task(DeadlineSweep(WorkerQueue(redis, client.keys, queue, 1), on_reply=ignore).run())
        assert (await late.result(timeout=30)).finish_reason is FinishReason.DEADLINE
        while await redis.zcard(client.keys.later(queue, 0)):  # the sweep empties it
            assert not task.done()
            await asyncio.sleep(0.01)
        assert (await worker.start_next()).claim.job_id == delayed.id
        assert await redis.zcard(client.keys.deadlines(queue, 0)) == 0
        await cancel_tasks(task)


async def test_the_time_in_slots_is_stored_and_a_job_that_used_it_up_ends_at_its_next_claim(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("long", timeout_s=2)
        attempt = await worker.start_next()
        await worker.scripts.flush([replace(attempt.increment([1], "a"), slot_ms=1500)], LEASE_MS, renew=False)
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        again = await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS)
        assert not isinstance(again, str)
        assert (again.slot_ms, again.generated) == (1500, 1)
        await worker.redis.hset(client.keys.of_job(job.id).job, "slot_ms", "2000")
        assert await worker.claim_scripts.claim_job(attempt.claim, "third", LEASE_MS) == "ended"
        assert (await job.result(timeout=60)).finish_reason is FinishReason.DEADLINE
