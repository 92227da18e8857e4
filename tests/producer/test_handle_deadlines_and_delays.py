"""A job that has reached a deadline ends when a client looks at it or counts it, although no worker is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from llamaq.common.metrics import metric_definitions as f
from llamaq.producer import AsyncClient, FinishReason, JobState, QueueDepth
from llamaq.producer.queries.metrics import MetricsReader
from llamaq.worker.local.embedded_redis import EmbeddedRedis

Look = Callable[[AsyncClient, str], Awaitable[object]]


async def ended(client: AsyncClient, job_id: str) -> bool:
    return await client.redis.hget(client.keys.of_job(job_id).job, "status") == b"finished"


@pytest.mark.parametrize("option", ["queue_timeout_s", "deadline_s"])
@pytest.mark.parametrize(
    "look",
    [
        lambda client, job_id: client.job(job_id).status(),
        lambda client, job_id: client.queue_depth(),
        lambda client, job_id: client.jobs(),
        lambda client, job_id: client.queues(),
        lambda client, job_id: client.stats(),
        lambda client, job_id: client.purge(dry_run=True),
    ],
    ids=["status", "queue_depth", "jobs", "queues", "stats", "purge"],
)
async def test_a_look_ends_a_job_that_is_due(redis_url: str, queue: str, option: str, look: Look) -> None:
    async with AsyncClient(redis_url, queue, key_prefix=queue) as client:
        job = await client.submit("x", **{option: 0.02})  # type: ignore[arg-type]
        later = await client.submit("x", **{option: 1000})  # type: ignore[arg-type]
        await asyncio.sleep(0.03)  # by the clock of Redis, on the same machine
        assert not await ended(client, job.id)
        await look(client, job.id)
        assert await ended(client, job.id)
        assert not await ended(client, later.id)


async def test_the_answers_count_no_job_that_is_due(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, key_prefix=queue) as client:
        jobs = [await client.submit("x", queue_timeout_s=0.02) for _ in range(150)]
        await asyncio.sleep(0.03)
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)
        assert await client.jobs() == ()
        status = await jobs[0].status()
        assert (status.state, status.finish_reason) == (JobState.FINISHED, FinishReason.DEADLINE)
        late = await client.submit("x", deadline_s=0.02)
        await asyncio.sleep(0.03)
        assert (await late.status()).state is JobState.FINISHED
        assert (await client.job(late.id).result()).finish_reason is FinishReason.DEADLINE


@pytest.mark.starts_processes
async def test_a_server_that_refuses_writes_is_read_as_it_is(queue: str) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client:
            job = await client.submit("x", queue_timeout_s=0.02)
            await client.redis.config_set("min-replicas-to-write", 1)
            await asyncio.sleep(0.03)
            assert (await job.status()).state is JobState.QUEUED
            assert await client.queue_depth() == QueueDepth(waiting=1, running=0)
            samples = await MetricsReader().read(client.connection, 8)
            assert samples.values[f.REDIS_UP][()] == 1
