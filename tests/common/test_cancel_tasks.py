"""Cancelled tasks end, even when redis-py swallows a cancellation."""

from __future__ import annotations

import asyncio

from llamaq.common.background_tasks import cancel_tasks


async def swallow(times: int, log: list[int]) -> None:
    """Swallow cancellations, as `asyncio.wait_for` may do before Python 3.12."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append(times)
            if len(log) > times:
                raise


async def test_a_task_that_swallows_cancellations_is_cancelled_again() -> None:
    log: list[int] = []
    task = asyncio.create_task(swallow(2, log))
    await asyncio.sleep(0)
    await cancel_tasks(task)
    assert task.cancelled()
    assert len(log) == 3


async def test_tasks_that_have_already_ended_are_accepted() -> None:
    async def fail() -> None:
        raise ValueError("dropped")

    failed, done = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0))
    await asyncio.wait([failed, done])
    await cancel_tasks(failed, done)
    await cancel_tasks()
