"""Helpers for asyncio tasks that use Redis: tasks in the background, tasks that end together, and cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
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


def drop_error(task: asyncio.Task[Any]) -> None:
    """Fetch the error of a task that nothing waits for. Otherwise asyncio logs that it was never retrieved."""
    if not task.cancelled():
        task.exception()


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines, which run at the same time.

    If one raises an error, the others are cancelled, and this error is raised.
    """
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in tasks]
