"""Connections to Redis, made in one place so that all of them behave alike."""

from __future__ import annotations

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.errors import InvalidSettings

RETRIES = 3
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 15.0
"""Longer than any blocking command that llamaq sends."""
MAX_CONNECTIONS = 32
"""Of one process. Redis answers one command after another anyway; who finds all of them in use waits."""


def connect(url: str, *, name: str) -> Redis:
    """A pool of connections that retries a cut command; it connects at the first command.

    `name` shows in `CLIENT LIST`. Raises `InvalidSettings` for what is no URL of Redis.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,
            protocol=2,
            client_name=name,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.02), RETRIES),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
    except ValueError as exc:
        raise InvalidSettings(f"--redis-url (LLAMAQ_REDIS_URL): {exc}") from exc
    return Redis.from_pool(pool)
