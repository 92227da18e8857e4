"""Measurements of ticks and finished jobs, for the heartbeat and for the user's hooks.

A hook is a function `hook(name, measurements)`. `name` is `tick` or `request.done`, and `measurements` is a dict with
the fields of `TickStats` or `JobStats`. Hooks run on the I/O thread, so a slow hook delays streams, not the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.snapshots import TickStats

log = logging.getLogger(__name__)

TICK, REQUEST_DONE = "tick", "request.done"

Hook = Callable[[str, Mapping[str, Any]], None]


class Telemetry:
    """Counts ticks and jobs, keeps the last tick's measurements, and calls the hooks.

    Threads: the engine thread calls `record_tick`. The I/O thread calls `attach` and `record_job`, and reads the
    counters.
    """

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.last_tick: TickStats | None = None
        self.n_ticks = 0
        self.n_jobs_done = 0

    def attach(self) -> None:
        """From now on, call the hooks on the running event loop. They do not get ticks that were recorded earlier."""
        self._loop = asyncio.get_running_loop()

    def record_tick(self, stats: TickStats) -> None:
        """Record the measurements of a tick. Called on the engine thread."""
        self.last_tick = stats
        self.n_ticks += 1
        if self._hooks and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                self._loop.call_soon_threadsafe(self._call_hooks, TICK, stats)

    def record_job(self, stats: JobStats) -> None:
        """Record the measurements of a job whose end is stored in Redis. Called on the I/O thread."""
        self.n_jobs_done += 1
        self._call_hooks(REQUEST_DONE, stats)

    def _call_hooks(self, name: str, stats: TickStats | JobStats) -> None:
        for hook in self._hooks:
            try:
                hook(name, stats.model_dump())
            except Exception:  # a user's hook may raise anything
                log.exception("hook.failed hook=%r measurement=%s", hook, name)
