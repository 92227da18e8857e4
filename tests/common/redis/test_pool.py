"""Commands that wait for a connection of the pool get one in the order of their calls."""

from __future__ import annotations

import asyncio
from typing import Any

from llamaq.common.redis.connect import connect


async def test_a_task_that_sends_one_command_after_another_leaves_connections_to_others(redis_url: str) -> None:
    redis: Any = connect(redis_url, name="test-pool")
    redis.pool.max_connections = 1
    is_over = False

    async def send_again_and_again() -> None:
        while not is_over:
            await redis.execute_command("WAIT", 0, 1)  # a blocking command has a connection of its own

    greedy = asyncio.create_task(send_again_and_again())
    async with asyncio.timeout(10), redis:
        for _ in range(5):
            await asyncio.gather(*(redis.execute_command("WAIT", 0, 1) for _ in range(3)))
        is_over = True
        await greedy


async def test_a_cancelled_command_leaves_its_turn_to_the_next_one(redis_url: str) -> None:
    redis: Any = connect(redis_url, name="test-pool")
    redis.pool.max_connections = 1
    async with asyncio.timeout(10), redis:
        connection = await redis.pool.get_connection()
        first, second = (asyncio.create_task(redis.pool.get_connection()) for _ in range(2))
        await asyncio.sleep(0)
        await redis.pool.release(connection)  # the turn of the first has come
        first.cancel()
        assert await second is connection
        assert repr(redis.pool) == "<BoundedPool in_use=1 waiting=0>"
        await redis.pool.release(connection)
