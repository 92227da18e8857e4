"""Background tasks are referenced until they end, and their owner can wait for them or cancel them."""

from __future__ import annotations

import asyncio

import pytest

from llamaq.common.background_tasks import BackgroundTasks, all_of


async def test_a_started_task_is_referenced_until_it_has_ended() -> None:
    tasks = BackgroundTasks()
    release = asyncio.Event()
    task = tasks.start(release.wait())
    await asyncio.sleep(0)
    assert (len(tasks), repr(tasks)) == (1, "<BackgroundTasks 1 running>")
    release.set()
    assert await task is True
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_waiting_ends_with_the_last_task_and_drops_errors() -> None:
    async def fail() -> None:
        raise RuntimeError("expected")

    tasks = BackgroundTasks()
    failing = tasks.start(fail())
    passing = tasks.start(asyncio.sleep(0.01, "done"))
    await tasks.wait()
    assert passing.result() == "done"
    with pytest.raises(RuntimeError, match="expected"):
        failing.result()


async def test_cancelled_tasks_have_ended_afterwards() -> None:
    tasks = BackgroundTasks()
    task = tasks.start(asyncio.sleep(60))
    await tasks.cancel()
    assert task.cancelled()


async def test_all_of_returns_the_results_in_order_and_cancels_the_others_after_an_error() -> None:
    is_cancelled = asyncio.Event()

    async def wait() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise
        return "not cancelled"

    async def fail() -> str:
        raise ValueError("expected")

    assert await all_of([asyncio.sleep(0.01, "slow"), asyncio.sleep(0, "fast")]) == ["slow", "fast"]
    assert await all_of([asyncio.sleep(0, "alone")]) == ["alone"]
    with pytest.raises(ValueError, match="expected"):
        await all_of([wait(), fail()])
    assert is_cancelled.is_set()
