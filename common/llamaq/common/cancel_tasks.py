"""Ending asyncio tasks that talk to Redis."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_EVERY_S = 0.1


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until all of them have ended, and retrieve their errors.

    Once is not enough: redis-py sends within `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that
    comes at the moment when it is done.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_EVERY_S)
    await asyncio.gather(*tasks, return_exceptions=True)
