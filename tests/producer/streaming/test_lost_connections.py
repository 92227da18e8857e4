"""Streams lose and repeat no token when connections break, Redis restarts, or Redis has lost tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.numbered_streams import check_output, emit, read_all, submit_and_start, until_confirmed

from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis


async def kill_subscriptions(client: AsyncClient) -> int:
    """Kill every subscribed connection of the client and return their number."""
    listed: Any = await client.redis.client_list()
    subscribed = [one for one in listed if one["name"] == "llamaq-client" and int(one["sub"]) > 0]
    for one in subscribed:
        await client.redis.client_kill_filter(_id=one["id"])
    return len(subscribed)


async def test_no_token_is_lost_when_connections_are_killed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        readers = [asyncio.create_task(read_all(job)) for _ in range(3)]
        await until_confirmed(client)
        killed = 0
        for _ in range(4):
            await emit(attempt, 20)
            killed += await kill_subscriptions(client)
            await emit(attempt, 5)
            await until_confirmed(client)
        await attempt.finish()
        for reader in readers:
            check_output(await reader, 100)
        assert killed >= 4


async def test_after_a_reconnect_old_and_new_streams_are_complete(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        runs = [await submit_and_start(client, worker) for _ in range(10)]
        readers = [asyncio.create_task(read_all(job)) for job, _ in runs]
        await until_confirmed(client, 10)
        await kill_subscriptions(client)
        runs.append(await submit_and_start(client, worker))
        readers.append(asyncio.create_task(read_all(runs[-1][0])))
        for _, attempt in runs:
            await emit(attempt, 10)
            await attempt.finish()
        for reader in readers:
            check_output(await reader, 10)


@pytest.mark.starts_processes
async def test_no_token_is_lost_when_redis_restarts_with_its_append_only_file(
    tmp_path: Path, free_port: int, queue: str
) -> None:
    with EmbeddedRedis(port=free_port, data_dir=tmp_path) as first:
        async with AsyncClient(first.url, queue) as client, FakeWorker(first.url, queue) as worker:
            await worker.redis.config_set("appendfsync", "always")
            job, attempt = await submit_and_start(client, worker)
            reader = asyncio.create_task(read_all(job))
            result = asyncio.create_task(job.result(timeout=30))
            await until_confirmed(client)
            await emit(attempt, 30)
            first.stop()
            with pytest.raises(RedisConnectionError):
                await client.queue_depth()
            with EmbeddedRedis(port=free_port, data_dir=tmp_path):
                await emit(attempt, 30)
                await attempt.finish()
                check_output(await reader, 60)
                assert len((await result).tokens) == 60
                check_output(await read_all(job), 60)


async def test_tokens_that_redis_lost_and_the_worker_sent_again_are_yielded_once(redis_url: str, queue: str) -> None:
    """After a failover, the event stream may lack tokens that were already published. The worker sends these again."""
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        reader = asyncio.create_task(read_all(job))
        await until_confirmed(client)
        await emit(attempt, 10)
        keys = client.keys.of_job(job.id)
        lost: Any = await client.redis.xrevrange(keys.events, count=4)
        await client.redis.xdel(keys.events, *[entry_id for entry_id, _ in lost])
        await client.redis.hset(keys.job, "generated", "6")
        await kill_subscriptions(client)
        await until_confirmed(client)
        # The worker sends the missing tokens as one event, although it first sent them as several events.
        attempt.stored, attempt.text = 6, "".join(f"{number} " for number in range(6))
        await attempt.emit(range(6, 12), "".join(f"{number} " for number in range(6, 12)))
        await emit(attempt, 3)
        attempt.tokens = list(range(15))
        await attempt.finish()
        check_output(await reader, 15)
