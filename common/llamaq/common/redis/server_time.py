"""The clock of the Redis server, which every time that llamaq stores or compares across hosts is read from."""

from __future__ import annotations

from redis.asyncio import Redis


async def server_time_ms(redis: Redis) -> int:
    """Return the time of the Redis server in milliseconds since the epoch.

    The Lua scripts read the same clock with `now_ms` of `_lib.lua`.

    Raises:
        RedisError: the server cannot be reached.
    """
    seconds, microseconds = await redis.time()
    return int(seconds) * 1000 + int(microseconds) // 1000
