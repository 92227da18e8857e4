"""No thread waits forever for a portal that stops, at whatever moment its call arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from llamaq.producer import AsyncClient
from llamaq.producer.blocking_portal import BlockingPortal


class Moments:
    """Starts a call in another thread at a moment of the stop, and waits until it was passed to the loop or refused."""

    def __init__(self, redis_url: str, queue: str) -> None:
        self.portal = BlockingPortal(lambda: AsyncClient(redis_url, queue))
        self.loop = self.portal._loop
        self.call: Future[None] = Future()
        self._was_passed = threading.Event()

    def call_now(self) -> None:
        pass_to_loop = self.loop.call_soon_threadsafe

        def note(*args: Any, **kwargs: Any) -> object:
            try:
                return pass_to_loop(*args, **kwargs)
            finally:
                self._was_passed.set()

        self.loop.call_soon_threadsafe = note  # type: ignore[method-assign, assignment]
        threading.Thread(target=self._call, daemon=True).start()
        assert self._was_passed.wait(10)

    def _call(self) -> None:
        try:
            self.portal.run(asyncio.Event().wait)
        except BaseException as exc:  # noqa: BLE001  # the test checks it
            self.call.set_exception(exc)
        else:
            self.call.set_result(None)
        self._was_passed.set()


def in_the_last_iteration(moments: Moments) -> None:
    stop = moments.loop.stop

    def call_and_stop() -> None:
        moments.call_now()
        stop()

    moments.loop.stop = call_and_stop  # type: ignore[method-assign]


def after_the_other_tasks_were_cancelled(moments: Moments) -> None:
    shutdown = moments.loop.shutdown_asyncgens

    async def call_and_shut_down() -> None:
        moments.call_now()
        await asyncio.sleep(0)  # the loop sees the call
        await shutdown()

    moments.loop.shutdown_asyncgens = call_and_shut_down  # type: ignore[method-assign]


def after_the_last_iteration(moments: Moments) -> None:
    close = moments.loop.close

    def call_and_close() -> None:
        moments.call_now()
        close()

    moments.loop.close = call_and_close  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "moment", [after_the_other_tasks_were_cancelled, in_the_last_iteration, after_the_last_iteration]
)
def test_a_call_that_arrives_during_the_stop_ends_with_an_error(
    redis_url: str, queue: str, moment: Callable[[Moments], None]
) -> None:
    moments = Moments(redis_url, queue)
    moment(moments)
    moments.portal.stop()
    with pytest.raises(RuntimeError, match="closed"):
        moments.call.result(timeout=60)


def test_a_reader_that_the_stop_wakes_ends_and_the_portal_closes_its_generator(redis_url: str, queue: str) -> None:
    portal = BlockingPortal(lambda: AsyncClient(redis_url, queue))
    is_waiting, is_closed = threading.Event(), threading.Event()
    error: Future[BaseException] = Future()

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            is_waiting.set()
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    def read() -> None:
        try:
            for _ in portal.iterate(items()):
                pass
        except BaseException as exc:  # noqa: BLE001  # the test checks it
            error.set_result(exc)

    threading.Thread(target=read, daemon=True).start()
    assert is_waiting.wait(10)
    portal.stop()
    assert isinstance(error.result(timeout=60), RuntimeError)
    assert is_closed.is_set()
