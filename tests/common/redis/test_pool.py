"""Commands that wait for a connection of the pool get one in the order of their calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import Redis
from tests.support.redis_servers import wait_until

from llamaq.common.redis.connect import connect


async def test_a_task_that_sends_one_command_after_another_leaves_connections_to_others(redis_url: str) -> None:
    redis: Any = connect(redis_url, name="test-pool")
    redis.pool.max_connections = 1
    is_over = False

    async def send_again_and_again() -> None:
        while not is_over:
            await redis.execute_command("WAIT", 0, 1)  # a blocking command has a connection of its own

    greedy = asyncio.create_task(send_again_and_again())
    async with asyncio.timeout(60), redis:
        for _ in range(5):
            await asyncio.gather(*(redis.execute_command("WAIT", 0, 1) for _ in range(3)))
        is_over = True
        await greedy


async def test_a_cancelled_command_leaves_its_turn_to_the_next_one(redis_url: str) -> None:
    redis: Any = connect(redis_url, name="test-pool")
    redis.pool.max_connections = 1
    async with asyncio.timeout(60), redis:
        connection = await redis.pool.get_connection()
        first, second = (asyncio.create_task(redis.pool.get_connection()) for _ in range(2))
        await asyncio.sleep(0)
        await redis.pool.release(connection)  # the turn of the first has come
        first.cancel()
        assert await second is connection
        assert repr(redis.pool) == "<BoundedPool in_use=1 waiting=0>"
        await redis.pool.release(connection)


async def await_no_connections(redis_url: str, name: str) -> None:
    """Wait until Redis has closed its end of all connections with this name."""
    with Redis.from_url(redis_url) as redis:
        await asyncio.to_thread(
            wait_until, lambda: all(one["name"] != name for one in redis.client_list()), "no connection", 10
        )


async def test_a_command_fails_if_its_client_is_closed_while_the_connection_is_opened(
    redis_url: str, queue: str
) -> None:
    redis = connect(redis_url, name=queue)
    call = asyncio.ensure_future(redis.incr(queue))
    await asyncio.sleep(0)
    await redis.aclose()
    with pytest.raises(RuntimeError, match="this client was closed"):
        await call
    await await_no_connections(redis_url, queue)


async def test_commands_that_wait_for_a_connection_fail_when_the_client_is_closed(redis_url: str, queue: str) -> None:
    redis: Any = connect(redis_url, name=queue)
    redis.pool.max_connections = 1
    connection = await redis.pool.get_connection()
    calls = [asyncio.create_task(redis.execute_command("WAIT", 0, 1)) for _ in range(3)]
    await asyncio.sleep(0)
    await redis.aclose()
    await redis.pool.release(connection)
    for call in calls:
        with pytest.raises(RuntimeError, match="this client was closed"):
            await call
    await await_no_connections(redis_url, queue)


async def test_a_connection_that_is_lent_when_the_client_is_closed_does_not_stay_open(
    redis_url: str, queue: str
) -> None:
    redis: Any = connect(redis_url, name=queue)
    async with redis.client() as client:
        await client.ping()
        await redis.aclose()
        await client.ping()
    await await_no_connections(redis_url, queue)
