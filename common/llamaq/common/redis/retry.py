"""When to try a Redis command again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class RetryUntilDeadline(Retry):
    """Tries again with growing pauses for so many seconds, and once in any case.

    By the clock and not by a count: redis-py retries within retries, and what waits for a timeout each time and what
    is refused at once shall be given up after the same time.
    """

    def __init__(self, for_s: float) -> None:
        super().__init__(ExponentialBackoff(cap=LONGEST_PAUSE_S, base=FIRST_PAUSE_S), retries=-1)
        self._for_s = for_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Raises the last error."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._for_s
        n_failed = 0

        def goes_on(error: Exception) -> bool:
            nonlocal n_failed
            n_failed += 1
            return (n_failed == 1 or clock() < deadline) and (is_retryable is None or is_retryable(error))

        return await super().call_with_retry(do, fail, goes_on, with_failure_count)
