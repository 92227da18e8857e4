"""Reads the clock of the Redis server. llamaq uses this clock for times that several hosts compare."""

from __future__ import annotations

from redis.asyncio import Redis


async def server_time_ms(redis: Redis) -> int:
    """Return the time of the Redis server in milliseconds since the epoch.

    The Lua scripts read the same clock with `now_ms` of `_lib.lua`.

    Raises:
        RedisError: The server cannot be reached.
    """
    seconds, microseconds = await redis.time()
    return int(seconds) * 1000 + int(microseconds) // 1000
