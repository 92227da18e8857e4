"""Waits until replicas of Redis have the last writes."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.shared_round_trips import Command


async def wait_for_replicas(redis: Redis, config: str, n_replicas: int, timeout_ms: int) -> int:
    """Wait until replicas have all earlier writes to the server of a partition, and return their number.

    WAIT only waits for writes of its own connection, and the earlier writes may have used another one. So this function
    writes once more, to a field whose value has no meaning.

    Args:
        redis: The Redis client.
        config: Key of the settings of the partition.
        n_replicas: Number of replicas to wait for.
        timeout_ms: Longest wait in milliseconds.
    """
    if not isinstance(redis, RetryingRedis):
        raise TypeError("connect() did not create this client of Redis")
    commands: list[Command] = [
        (("HSET", config, "durable", n_replicas), {}),
        (("WAIT", n_replicas, timeout_ms), {}),
    ]
    written, confirmed = await redis.call_with_retry(lambda: redis.send_together(config, commands))
    if isinstance(confirmed, ResponseError):
        raise confirmed
    return 0 if isinstance(written, ResponseError) else int(confirmed)
