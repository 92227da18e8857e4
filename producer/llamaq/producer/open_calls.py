"""The calls of one client that a close interrupts, because they have jobs to cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

from llamaq.common.redis.shared_round_trips import CLOSED


class Closable(Protocol):
    """An object of the event loop that must be closed there."""

    async def aclose(self) -> None:
        """Close the object."""


class OpenCalls:
    """The calls with jobs of their own that use the connections of one event loop, until these are closed."""

    def __init__(self) -> None:
        self.windows: WeakSet[Closable] = WeakSet()
        """The windows of `map` calls and bulk runs, which cancel their jobs when they are closed."""
        self._ends: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        """For each task that runs a call, a future that is done when the call has ended."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<OpenCalls {len(self._ends)} open>"

    def check_open(self) -> None:
        """Raise `RuntimeError` if the connections are closed."""
        if self._is_closed:
            raise RuntimeError(CLOSED)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let `interrupt` end the call that runs in this context, which then raises `RuntimeError`.

        Like `asyncio.timeout`, it cancels the task, and replaces the `CancelledError`.
        """
        self.check_open()
        task: Any = asyncio.current_task()
        n_cancellations, ended = task.cancelling(), asyncio.get_running_loop().create_future()
        self._ends[task] = ended
        try:
            yield
        except asyncio.CancelledError:
            if self._is_closed and task.cancelling() == n_cancellations + 1:  # only `interrupt` has cancelled it
                raise RuntimeError(CLOSED) from None
            raise
        finally:
            if self._is_closed:
                task.uncancel()
            del self._ends[task]
            ended.set_result(None)

    def interrupt(self) -> None:
        """Interrupt all calls. No call begins later."""
        if not self._is_closed:
            self._is_closed = True
            for task in self._ends:
                task.cancel()

    async def wait(self) -> None:
        """Close all windows, and wait until all calls have ended."""
        await asyncio.gather(*(window.aclose() for window in list(self.windows)), return_exceptions=True)
        if self._ends:
            await asyncio.wait(self._ends.values())
