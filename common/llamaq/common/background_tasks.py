"""Asyncio tasks that run in the background until they end, or until their owner cancels them. They may use Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_EVERY_S = 0.1
"""Pause between two cancellations of the same task."""


class BackgroundTasks:
    """The background tasks of one owner.

    The event loop keeps only weak references to tasks, so a task without an owner may be garbage collected while it
    runs.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task and return the task. A task that has ended is dropped."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Wait until all tasks have ended. Their errors are dropped. If the wait is cancelled, the tasks continue."""
        while self._tasks:
            await asyncio.wait([asyncio.gather(*self._tasks, return_exceptions=True)])

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. Their errors are dropped."""
        await cancel_tasks(*self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"<BackgroundTasks {len(self._tasks)} running>"


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
