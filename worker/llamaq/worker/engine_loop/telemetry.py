"""Measurements of ticks and finished jobs: the last ones are kept for the heartbeat, all go to the user's hooks.

A hook is a function `hook(name, measurements)`, where `name` is `tick` or `request.done` and `measurements` is a
dict with the fields of `TickStats` or `JobStats`. Hooks run on the I/O thread: a slow one delays streams, not the
engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.queue_state import TickStats

log = logging.getLogger(__name__)

TICK, REQUEST_DONE = "tick", "request.done"

Hook = Callable[[str, Mapping[str, Any]], None]


class Telemetry:
    """Takes measurements from both threads. `attach` it to the I/O thread's loop before hooks can be called."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.last_tick: TickStats | None = None
        self.ticks = 0
        self.jobs_done = 0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call hooks on this loop from now on."""
        self._loop = loop

    def tick(self, stats: TickStats) -> None:
        """A tick is over. Called on the engine thread."""
        self.last_tick = stats
        self.ticks += 1
        if self._hooks and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the process is on its way out
                self._loop.call_soon_threadsafe(self._call, TICK, stats)

    def request_done(self, stats: JobStats) -> None:
        """A job has ended and Redis knows. Called on the I/O thread."""
        self.jobs_done += 1
        self._call(REQUEST_DONE, stats)

    def _call(self, name: str, stats: TickStats | JobStats) -> None:
        for hook in self._hooks:
            try:
                hook(name, stats.model_dump())
            except Exception:  # a user's hook may raise anything
                log.exception("hook.failed hook=%r measurement=%s", hook, name)
