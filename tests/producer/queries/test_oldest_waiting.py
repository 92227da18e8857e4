"""How long the oldest waiting job has waited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.fake_redis import replace_redis
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP
from llamaq.producer import AsyncClient
from llamaq.producer.queries.queue_snapshots import oldest_waiting_s
from llamaq.producer.testing import FakeWorker

PAUSE_S = 0.05


async def test_without_a_waiting_job_there_is_no_age(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncClient(replace_redis(monkeypatch), "tests", partitions=2) as client:
        assert await oldest_waiting_s(client.connection, "tests", 2) is None
        await client.submit("x", delay_s=1000)
        assert await oldest_waiting_s(client.connection, "tests", 2) is None
        await client.submit("x")
        found = await oldest_waiting_s(client.connection, "tests", 2)
        assert found is not None
        assert 0 <= found < 60


async def test_running_jobs_are_passed_and_jobs_that_wait_in_a_worker_are_not(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        for _ in range(3):
            await client.submit("x")
            await asyncio.sleep(PAUSE_S)  # the ages differ

        async def age_s() -> float:
            found = await oldest_waiting_s(client.connection, queue, 1)
            assert found is not None
            return found

        assert await age_s() >= 3 * PAUSE_S
        first = await worker.start_next()
        of_second = await age_s()
        assert of_second < await age_of(first.claim.job_id, client)
        assert await worker.claim() is not None  # it waits for a slot in the worker
        assert await age_s() >= of_second
        await worker_scripts(worker).requeue(first.claim, first.number)
        assert await age_s() > of_second + PAUSE_S / 2


async def age_of(job_id: str, client: AsyncClient) -> float:
    """Return the age of a job in seconds."""
    return next(job.age_s for job in await client.jobs() if job.job_id == job_id)


async def test_more_running_jobs_than_one_page_are_passed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        stream = client.keys.jobs(queue, 0, Priority.BULK)
        await client.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        await client.submit_many([{"prompt": "x", "priority": "bulk"} for _ in range(230)])
        await client.redis.xreadgroup(GROUP, "worker", {stream: ">"}, count=230)
        assert await oldest_waiting_s(client.connection, queue, 1) is None
        await client.submit("x", priority="bulk")
        assert await oldest_waiting_s(client.connection, queue, 1) is not None


@pytest.mark.parametrize("damage", [{"submitted_ms": "x"}, {"waits_from_ms": "", "submitted_ms": "never"}])
async def test_a_damaged_job_waits_from_the_time_of_its_entry(redis_url: str, queue: str, damage: Any) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("x")
        await client.redis.hset(client.keys.of_job(job.id).job, mapping=damage)
        found = await oldest_waiting_s(client.connection, queue, 1)
        assert found is not None
        assert 0 <= found < 60


async def test_a_stream_that_was_overwritten_has_no_waiting_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.set(client.keys.jobs(queue, 0, Priority.BULK), "not a stream")
        assert await oldest_waiting_s(client.connection, queue, 1) is None
        await client.redis.delete(client.keys.jobs(queue, 0, Priority.BULK))
