"""Waits of one task with a time limit, at a low cost for each wait."""

from __future__ import annotations

import asyncio


class TimedWait:
    """Lets one task wait until it is woken, or until a deadline.

    One timer of the event loop serves all waits, because a reader waits for each chunk: `asyncio.timeout` would create
    and cancel a timer each time. The timer stays when a wait ends, and is set again only when it fires too early.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[bool] | None = None
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<TimedWait {'idle' if self._waiting is None else 'waiting'}>"

    async def until(self, deadline_s: float) -> bool:
        """Wait until `wake` is called or the deadline has passed, a time of the event loop.

        Returns:
            Whether `wake` was called before the deadline.
        """
        self._deadline_s = deadline_s
        if self._timer is None or self._timer.when() > deadline_s:
            self._set_timer()
        self._waiting = self._loop.create_future()
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def wake(self) -> None:
        """End the wait of the waiting task, if there is one."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(True)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.close()
        self._timer = self._loop.call_at(self._deadline_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._waiting is None or self._waiting.done():
            return
        if self._loop.time() < self._deadline_s:
            self._set_timer()
        else:
            self._waiting.set_result(False)
