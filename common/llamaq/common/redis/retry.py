"""Retries a Redis command until a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


class RetryUntilDeadline(Retry):
    """Retries a command until a deadline, with growing pauses. A command is retried at least once.

    The limit is a deadline and not a number of retries, because redis-py nests retries. A command that times out should
    also end after the same time as a command that is refused at once.
    """

    def __init__(self, longest_s: float) -> None:
        """Retry for at most `longest_s` seconds."""
        super().__init__(ExponentialBackoff(cap=LONGEST_PAUSE_S, base=FIRST_PAUSE_S), retries=-1)
        self._longest_s = longest_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Return the result of `do`; see `Retry.call_with_retry`. After the deadline raise the last error."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._longest_s
        n_failed = 0

        def should_retry(error: Exception) -> bool:
            nonlocal n_failed
            n_failed += 1
            return (n_failed == 1 or clock() < deadline) and (is_retryable is None or is_retryable(error))

        return await super().call_with_retry(do, fail, should_retry, with_failure_count)
