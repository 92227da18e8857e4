"""Ends the I/O thread after an error of a callback or of a background task, which asyncio only logs.

Such an error is a defect. The jobs that the callback or the task should have passed on would otherwise stay with this
worker forever, because the worker renews their leases.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from redis.exceptions import RedisError


class LostErrors:
    """Notices errors that nothing awaits.

    Args:
        loop: The event loop whose errors are noticed. They are still logged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._first: asyncio.Future[Exception] = loop.create_future()
        loop.set_exception_handler(self._handle)

    async def run(self) -> None:
        """Wait for the first of these errors, and raise it."""
        raise await self._first

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if not isinstance(error, Exception) or isinstance(error, RedisError):
            return  # the services log an outage of Redis and try again
        if _is_of_llamaq(error) and not self._first.done():
            self._first.set_result(error)

    def __repr__(self) -> str:
        return f"<LostErrors {self._first!r}>"


def _is_of_llamaq(error: Exception) -> bool:
    """Return whether the callback or the task is a function of llamaq. The callbacks of libraries pass on no jobs."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((name for name in modules if not name.startswith("asyncio.")), "").startswith("llamaq.")
