"""Submits to a full queue, concurrent submits with the same idempotency key, and submits to a full Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, AsyncJob, Client, InvalidRequest, QueueFull, RedisFull
from llamaq.producer.queries.queue_snapshots import RATE_WINDOW_S
from llamaq.producer.testing import FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

N_CLIENTS = 8


@asynccontextmanager
async def many_clients(url: str, queue: str, **settings: Any) -> AsyncIterator[list[AsyncClient]]:
    """Yield several clients, each with its own connections."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AsyncClient(url, queue, **settings)) for _ in range(N_CLIENTS)]


async def set_max_queue(url: str, queue: str, max_queue: int, partitions: int = 1) -> None:
    async with AsyncClient(url, queue) as client:
        for partition in range(partitions):
            await client.redis.hset(client.keys.config(queue, partition), "max_queue", str(max_queue))


async def add_ended_jobs(client: AsyncClient, seconds_ago: list[float]) -> int:
    """Add the stats of jobs that ended at these times. Return the time of Redis in milliseconds."""
    now_ms = await server_time_ms(client.redis)
    for ago_s in sorted(seconds_ago, reverse=True):
        fields: dict[Any, Any] = {"job": codec.encode_model(RecentJob(job_id="x", stats=JobStats()))}
        await client.redis.xadd(client.keys.stats(client.queue), fields, id=f"{now_ms - int(ago_s * 1000)}-1")
    return now_ms


# max_queue


async def test_a_bounded_queue_accepts_exactly_max_queue_of_concurrent_submits(redis_url: str, queue: str) -> None:
    await set_max_queue(redis_url, queue, 17)
    async with many_clients(redis_url, queue) as clients:
        submits = [
            client.submit("hello", priority=("bulk", "interactive")[i % 2]) for i in range(12) for client in clients
        ]
        outcomes = await asyncio.gather(*submits, return_exceptions=True)
        accepted = [outcome for outcome in outcomes if isinstance(outcome, AsyncJob)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
        assert (len(accepted), len(refused)) == (17, len(outcomes) - 17)
        assert {(full.depth, full.max_queue, full.queue) for full in refused} == {(17, 17, queue)}
        assert (await clients[0].queue_depth()).waiting == 17
        await accepted[0].cancel()
        await clients[0].submit("one waiting job less")


async def test_a_full_queue_estimates_the_wait(redis_url: str, queue: str) -> None:
    await set_max_queue(redis_url, queue, 2)
    async with AsyncClient(redis_url, queue) as client:
        now_ms = await add_ended_jobs(client, [RATE_WINDOW_S + 100, RATE_WINDOW_S + 50, 20, 15, 10, 5, 0])
        for _ in range(2):
            await client.submit("hello")
        with pytest.raises(QueueFull) as caught:
            await client.submit("one too many")
        # Four jobs finished in the 20 s after the oldest job of the window, and none since then. Two jobs wait.
        since_s = (await server_time_ms(client.redis) - now_ms) / 1000
        assert caught.value.estimated_wait_s is not None
        assert 2 / (4 / 20) <= caught.value.estimated_wait_s <= 2 / (4 / (20 + since_s)) + 1e-6
        assert "one more would wait about" in str(caught.value)


async def test_the_estimate_counts_the_jobs_of_all_partitions(redis_url: str, queue: str) -> None:
    await set_max_queue(redis_url, queue, 1, partitions=3)
    async with AsyncClient(redis_url, queue, partitions=3) as client:
        now_ms = await add_ended_jobs(client, [20, 10, 0])
        full: QueueFull | None = None
        while full is None:
            try:
                await client.submit("hello")
            except QueueFull as exc:
                full = exc
        assert (full.depth, full.max_queue) == (1, 1)
        since_s = (await server_time_ms(client.redis) - now_ms) / 1000
        assert full.estimated_wait_s is not None
        assert 3 * 1 / (2 / 20) <= full.estimated_wait_s <= 3 * 1 / (2 / (20 + since_s)) + 1e-6


@pytest.mark.parametrize("seconds_ago", [[], [3.0], [RATE_WINDOW_S + 20, RATE_WINDOW_S + 10, 5.0]])
async def test_there_is_no_estimate_when_fewer_than_two_jobs_ended_recently(
    redis_url: str, queue: str, seconds_ago: list[float]
) -> None:
    await set_max_queue(redis_url, queue, 1)
    async with AsyncClient(redis_url, queue) as client:
        await add_ended_jobs(client, seconds_ago)
        await client.submit("hello")
        with pytest.raises(QueueFull) as caught:
            await client.submit("one too many")
        assert caught.value.estimated_wait_s is None
        assert str(caught.value) == f"queue {queue!r} is full: 1 jobs wait and its workers allow 1 (--max-queue)"


async def test_the_estimate_is_close_to_the_real_wait(redis_url: str, queue: str) -> None:
    await set_max_queue(redis_url, queue, 10)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            while True:
                attempt = await worker.start_next()
                await asyncio.sleep(0.05)
                await attempt.finish()

        serving = asyncio.create_task(serve())
        for _ in range(10):
            await (await client.submit("hello")).result()
        full: QueueFull | None = None
        last = await client.submit("hello")
        while full is None:
            try:
                last = await client.submit("hello")
            except QueueFull as exc:
                full, began_s = exc, loop.time()
        assert full.estimated_wait_s is not None
        await last.result()
        waited_s = loop.time() - began_s
        serving.cancel()
        assert waited_s / 10 < full.estimated_wait_s < 10 * waited_s  # the load of the machine may change meanwhile


def test_the_blocking_client_raises_the_same_queue_full(redis_url: str, queue: str) -> None:
    asyncio.run(set_max_queue(redis_url, queue, 1))
    with Client(redis_url, queue) as client:
        client.submit("hello")
        with pytest.raises(QueueFull, match="1 jobs wait") as caught:
            client.generate("one too many")
        assert (caught.value.depth, caught.value.estimated_wait_s) == (1, None)


# idempotency


async def test_a_hundred_concurrent_submits_with_one_key_make_one_job(redis_url: str, queue: str) -> None:
    async with many_clients(redis_url, queue, partitions=4) as clients:
        submits = [clients[number % N_CLIENTS].submit("hello", idempotency_key="order 7") for number in range(100)]
        jobs = await asyncio.gather(*submits)
        assert len({job.id for job in jobs}) == 1
        assert [job.is_new for job in jobs].count(True) == 1
        assert (await clients[0].queue_depth()).waiting == 1


async def test_a_submit_with_the_idempotency_key_of_a_job_returns_this_job_from_a_full_queue(
    redis_url: str, queue: str
) -> None:
    await set_max_queue(redis_url, queue, 1)
    async with AsyncClient(redis_url, queue) as client:
        first = await client.submit("hello", idempotency_key="order 7")
        again = await asyncio.gather(*(client.submit("hello", idempotency_key="order 7") for _ in range(10)))
        assert {job.id for job in again} == {first.id}
        with pytest.raises(QueueFull):
            await client.submit("hello", idempotency_key="order 8")


# a full Redis


@pytest.mark.starts_processes
async def test_a_full_redis_refuses_a_submit_with_an_error_that_names_the_settings(queue: str) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client:
            kept = await client.submit("hello", idempotency_key="order 7")
            await client.redis.config_set("maxmemory", 1)
            for attempt in (client.submit("x"), client.generate("x"), client.stream("x")):
                with pytest.raises(RedisFull, match=r"maxmemory.*result_ttl_s.*--max-queue"):
                    await attempt
            assert (await client.submit("hello", idempotency_key="order 7")).id == kept.id
            with pytest.raises(InvalidRequest):
                await client.submit("x", max_tokens=-2)
            assert (await client.queue_depth()).waiting == 1
            await client.redis.config_set("maxmemory", 0)
            await client.submit("one waiting job less")
            assert (await client.queue_depth()).waiting == 2
