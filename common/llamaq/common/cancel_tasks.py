"""Cancels asyncio tasks that use Redis."""

from __future__ import annotations

import asyncio
from typing import Any

# Pause between two cancellations of the same task.
CANCEL_EVERY_S = 0.1


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks repeatedly until all of them have ended. Their errors are dropped.

    One cancellation is not enough. redis-py sends with `asyncio.wait_for`. Before Python 3.12, this function loses a
    cancellation that arrives when the send completes.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_EVERY_S)
    await asyncio.gather(*tasks, return_exceptions=True)
