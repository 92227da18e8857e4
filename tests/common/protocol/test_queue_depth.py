"""The depth of a queue: only jobs with a slot of a live worker run."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError
from tests.support.fake_redis import replace_redis
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.redis.connect import connect
from llamaq.producer import AsyncClient, QueueFull
from llamaq.producer.testing import LEASE_MS, FakeWorker


async def test_jobs_of_all_partitions_are_counted_before_any_worker_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncClient(replace_redis(monkeypatch), "tests", partitions=3) as client:
        for number in range(6):
            await client.submit("x", priority=tuple(Priority)[number % 2])
        depth = await queue_depth(client.redis, Keys(), "tests", 3)
        assert (depth.waiting, depth.running) == (6, 0)


async def test_a_key_that_is_no_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = connect(replace_redis(monkeypatch), name="test")
    await redis.set(Keys().jobs("tests", 0, Priority.BULK), "no stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await queue_depth(redis, Keys(), "tests", 1)
    await redis.aclose()


async def test_a_mode_that_this_version_does_not_know_counts_as_open(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.hset(client.keys.config(queue, 0), "mode", b"\xff")
        assert (await client.queue_depth()).mode is QueueMode.OPEN


async def test_jobs_that_were_requeued_or_wait_in_a_worker_or_lost_their_worker_wait(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        for number in range(6):
            await client.submit("x", priority=tuple(Priority)[number % 2])
        running, requeued, lost, ended = [await worker.start_next() for _ in range(4)]
        claim = await worker.claim()
        assert claim is not None
        await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
        assert await _depth(client) == (2, 4)
        await ended.finish()
        await worker_scripts(worker).requeue(requeued.claim, requeued.number)
        assert await _depth(client) == (3, 2)
        await worker.scripts.flush([lost.increment()], 1, renew=True)  # the lease expires after 1 ms
        while await _depth(client) != (4, 1):
            pass
        await worker_scripts(worker).requeue(running.claim, running.number)
        assert await _depth(client) == (5, 0)


async def _depth(client: AsyncClient) -> tuple[int, int]:
    depth = await client.queue_depth()
    return depth.waiting, depth.running


async def test_max_queue_counts_waiting_jobs_as_the_depth_does(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.redis.hset(client.keys.config(queue, 0), "max_queue", "2")
        await client.submit("x")
        claim = await worker.claim()
        assert claim is not None
        await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
        await client.submit("x", priority="bulk")
        with pytest.raises(QueueFull) as full:
            await client.submit("x")
        assert (full.value.depth, full.value.max_queue) == (2, 2)
        await worker.start_next()
        await client.submit("x")
