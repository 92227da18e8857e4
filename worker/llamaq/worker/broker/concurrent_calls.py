"""Runs several calls at the same time, and raises no error before all of them have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable


async def run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait until all calls have ended, then raise the first error."""
    error = await first_error(calls)
    if error is not None:
        raise error


async def first_error(calls: Iterable[Awaitable[None]]) -> BaseException | None:
    """Wait until all calls have ended, and return the first error."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return next((outcome for outcome in outcomes if outcome is not None), None)
