"""Connections to Redis, made in one place so that all of them behave alike."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
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
    pool.connection_class = _cancellable(pool.connection_class)
    return Redis.from_pool(pool)


def _cancellable(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """This kind of connection, with cancellations that always arrive.

    redis-py sends with `asyncio.wait_for`, which on Python 3.11 swallows a cancellation, also that of a timeout, when
    it comes just as the sending is done (cpython issue 86296). The task would wait on, for ever.
    """

    class Cancellable(kind):  # type: ignore[misc,valid-type]
        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            task = asyncio.current_task()
            before = task.cancelling() if task else 0
            await super().send_packed_command(*args, **kwargs)
            if task and task.cancelling() > before:
                await self.disconnect(nowait=True)  # the answer to what was sent would be taken for another's
                raise asyncio.CancelledError

    return Cancellable
