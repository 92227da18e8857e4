"""A connection of one user, beside the pool of a client of Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from redis.asyncio import Redis

from llamaq.common.redis.connect import is_cluster


@asynccontextmanager
async def dedicated_connection(redis: Redis) -> AsyncIterator[Redis]:
    """Yield a client that sends all commands over one connection, which is faster. A cluster client uses its pools.

    It connects at the first command, which is retried like those of other clients.
    """
    if is_cluster(redis):
        yield redis
        return
    async with aclosing(redis.client()) as client:  # without `aclosing`, redis-py connects here, and does not retry
        yield client
