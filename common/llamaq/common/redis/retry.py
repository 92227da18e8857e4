"""Retries a Redis command until a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.backoff import Backoff

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


async def retry_until_deadline(call: Callable[[], Awaitable[T]], longest_s: float) -> T:
    """Return the result of `call`. While the server cannot be reached, call again, with growing pauses.

    The deadline is `longest_s` seconds after the first failure. The limit is a deadline and not a number of retries. So
    the call is retried for the same time if the server refuses connections and if it does not reply. There is at least
    one retry, because the first failure may only mean that an idle connection was broken.

    The call must not keep a connection of a pool between two tries, see `RetryingRedis`.

    Raises:
        RedisError: The error of the last try.
    """
    clock = asyncio.get_running_loop().time
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    deadline_s: float | None = None
    while True:
        try:
            return await call()
        except (RedisConnectionError, RedisTimeoutError):
            if deadline_s is None:
                deadline_s = clock() + longest_s
            elif clock() >= deadline_s:
                raise
        await asyncio.sleep(backoff.next_delay_s())
