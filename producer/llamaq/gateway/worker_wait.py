"""Repeats a question to the workers of a queue while the queue has none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from llamaq.common.backoff import Backoff
from llamaq.common.errors import NoWorker, WorkerEnded

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses between two questions."""

T = TypeVar("T")


async def reply_within(timeout_s: float, ask: Callable[[], Awaitable[T]]) -> T:
    """Return what `ask` returns. While no worker serves the queue, `ask` is called again.

    Args:
        timeout_s: `ask` is not called again after this number of seconds.
        ask: Asks a worker.

    Raises:
        NoWorker: No worker has served the queue in this time.
        WorkerEnded: The worker ended before it replied, and no other worker has served the queue in this time.
    """
    clock = asyncio.get_running_loop().time
    pauses, end_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), clock() + timeout_s
    while True:
        try:
            return await ask()
        except (NoWorker, WorkerEnded):
            pause_s = pauses.next_delay_s()
            if clock() + pause_s > end_s:
                raise
        await asyncio.sleep(pause_s)
