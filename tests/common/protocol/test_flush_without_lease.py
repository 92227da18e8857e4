"""A flush stores tokens although the leases cannot be renewed, unless the server is no longer the master."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.fake_redis import url_of_each_server

from llamaq.common.protocol.script_types import Attempt
from llamaq.producer import AsyncClient, JobState
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

redis_url = url_of_each_server


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """A server whose settings the test may change."""
    with EmbeddedRedis() as server:
        yield server


async def test_the_streams_of_a_worker_continue_after_an_operator_has_deleted_a_job_stream(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit("hello", priority=priority) for priority in ("interactive", "bulk")]
        attempts = [await worker.start_next() for _ in jobs]
        await client.redis.delete(client.keys.of_job(jobs[0].id).interactive)
        for count in (1, 2, 3):
            increments = [attempt.increment([count], "a", offset=count - 1) for attempt in attempts]
            replies = await worker.scripts.flush(increments, LEASE_MS, renew=True)
            assert [(reply.code, reply.stored, reply.refusal) for reply in replies] == [("ok", count, "")] * 2


async def test_a_job_starts_and_is_preempted_after_an_operator_has_deleted_its_job_stream(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        claimed = await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
        assert isinstance(claimed, Attempt)
        await client.redis.delete(client.keys.of_job(job.id).interactive)
        attempt = FakeAttempt(worker, claim, claimed)
        for has_slot, state in ((True, JobState.RUNNING), (False, JobState.QUEUED)):
            increment = replace(attempt.increment(), has_slot=has_slot)
            (reply,) = await worker.scripts.flush([increment], LEASE_MS, renew=False)
            assert (reply.code, reply.refusal) == ("ok", "")
            assert (await job.status()).state is state


async def test_a_job_starts_although_the_set_of_deadlines_is_overwritten(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        await client.redis.set(client.keys.deadlines(queue, 0), "of another client")
        await worker.start_next()
        assert (await job.status()).state is JobState.RUNNING
        await client.redis.delete(client.keys.deadlines(queue, 0))


@pytest.mark.starts_processes
async def test_a_renewal_that_the_server_refuses_is_an_error_of_the_call(own_server: EmbeddedRedis, queue: str) -> None:
    async with AsyncClient(own_server.url, queue) as client, FakeWorker(own_server.url, queue) as worker:
        await client.submit("hello")
        attempt = await worker.start_next()
        await client.redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(RedisConnectionError, match="NOREPLICAS"):
            await worker.scripts.flush([attempt.increment()], LEASE_MS, renew=True)
