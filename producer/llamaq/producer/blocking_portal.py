"""A thread with an event loop in it, in which a blocking client's `AsyncClient` lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from llamaq.producer.client import AsyncClient

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0


class BlockingPortal:
    """Runs coroutines for other threads. Its own thread ends with `stop` and never keeps the process alive."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self.client = make_client()
        self._thread = threading.Thread(target=self._serve, name="llamaq-client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "stopped" if self._loop.is_closed() else f"running={len(self._running)}"
        return f"<BlockingPortal pid={self._pid} {state}>"

    @property
    def is_of_this_process(self) -> bool:
        """False after a fork: threads stay behind."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and wait for it; an interrupt of the waiting thread cancels it."""
        tracked = self._track(work)
        try:
            future = asyncio.run_coroutine_threadsafe(tracked, self._loop)
        except RuntimeError:
            tracked.close()
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items one by one; leaving early closes their generator."""
        try:
            while True:
                item = self.run(_next_or_none(items))
                if item is None:
                    return
                yield item
        finally:
            self._close(items)

    def stop(self) -> None:
        """Cancel what runs, close the client, end the thread. Does nothing the second time, and after a fork."""
        if not self.is_of_this_process:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)

    def _close(self, items: AsyncGenerator[Any, None]) -> None:
        """Also called by the garbage collector, in any thread, and when the loop has gone."""
        if not self.is_of_this_process or self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:
            self._loop.create_task(_aclose(items))
        else:
            self.run(_aclose(items))

    async def _track(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await task

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        await self._stopping.wait()
        # In this order, so that every job left behind is cancelled while there is a connection to say so.
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self.client.aclose()


async def _next_or_none(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


async def _aclose(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
