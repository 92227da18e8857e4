"""The retry policy of all reads that a call sends to Redis after its job was submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from llamaq.common.backoff import Backoff
from llamaq.common.redis.write_refusals import refuses_writes

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


class RetriedReads:
    """Repeats a read while Redis cannot be reached, loads its data or is not ready, until the timeout of the call."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        """The error of the newest try. None: it did not fail."""

    async def read(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, and call it again after an error that may be temporary.

        Raises:
            RedisError: The error is not temporary.
        """
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                result = await attempt()
            except (RedisError, OSError) as exc:
                if not is_temporary(exc):
                    raise
                self.error = exc
                await asyncio.sleep(pauses.next_delay_s())
            else:
                self.error = None
                return result


def is_temporary(error: Exception) -> bool:
    """Return whether a read that failed with this error may succeed later."""
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return False
    return not isinstance(error, ResponseError) or refuses_writes(error) or str(error).startswith("BUSY")
