"""A task waits until it is woken or until a deadline, with one timer for all of its waits."""

from __future__ import annotations

import asyncio

import pytest

from llamaq.producer.streaming.timed_wait import TimedWait


async def test_a_wait_ends_when_it_is_woken_and_at_its_deadline() -> None:
    loop = asyncio.get_running_loop()
    wait = TimedWait()
    loop.call_soon(wait.wake)
    assert await wait.until(loop.time() + 10) is True
    assert await wait.until(loop.time() + 0.02) is False
    wait.wake()  # nothing waits
    wait.close()


async def test_the_timer_of_an_earlier_wait_does_not_end_a_later_one() -> None:
    loop = asyncio.get_running_loop()
    wait = TimedWait()
    loop.call_soon(wait.wake)
    assert await wait.until(loop.time() + 0.02) is True
    loop.call_later(0.1, wait.wake)
    assert await wait.until(loop.time() + 10) is True
    wait.close()


async def test_many_waits_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    n_timers = 0
    call_at = loop.call_at

    def count(*args: object, **options: object) -> asyncio.TimerHandle:
        nonlocal n_timers
        n_timers += 1
        return call_at(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_at", count)
    wait = TimedWait()
    for _ in range(100):
        loop.call_soon(wait.wake)
        assert await wait.until(loop.time() + 60)
    assert n_timers == 1
    wait.close()


async def test_a_cancelled_wait_can_be_followed_by_another() -> None:
    loop = asyncio.get_running_loop()
    wait = TimedWait()
    waiting = asyncio.ensure_future(wait.until(loop.time() + 60))
    await asyncio.sleep(0)
    assert repr(wait) == "<TimedWait waiting>"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    loop.call_soon(wait.wake)
    assert await wait.until(loop.time() + 10)
    wait.close()
