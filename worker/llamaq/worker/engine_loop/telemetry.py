"""Measurements of ticks and finished jobs, for the heartbeat and for the user's hooks.

A hook is a function `hook(name, measurements)`. `name` is `tick` or `request.done`, and `measurements` is a dict:

- `tick`: `worker` and the fields of `TickStats`.
- `request.done`: the fields of `EndedJob`, with the fields of `JobStats` and `JobTimeline` in place of `stats` and
  `timeline`. The worker that claimed a job last reports its end, even if a client or another worker ended the job while
  it waited. The end of a damaged job, or of a job that crashed its workers, is reported by the worker that makes the
  dead letter.

Hooks run on the I/O thread, so a slow hook delays streams, not the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import JsonValue

from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.queue_and_worker_state import TickStats, TickTotals
from llamaq.worker.engine_loop.tick_sums import TickSums

log = logging.getLogger(__name__)

TICK, REQUEST_DONE = "tick", "request.done"

Hook = Callable[[str, Mapping[str, Any]], None]
"""Gets the name and the measurements of a tick or a job."""


@dataclass(frozen=True, slots=True)
class JobTimeline:
    """When the parts of a job began, in seconds since the epoch on the clock of the worker. None: it did not happen.

    `slot_at` and `first_token_at` describe the last attempt, the other times the job.
    """

    submitted_at: float | None = None
    first_slot_at: float | None = None
    slot_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job whose end is stored in Redis. Exactly one of `finish_reason` and `error_code` is set."""

    job_id: str
    stats: JobStats
    """The measurements of the job. If it had no slot, or if a client or another worker ended it, the fields that
    describe its run are not set."""
    finish_reason: FinishReason | None
    """Why the job ended without an error."""
    error_code: str | None
    """The code of a failed job, a value of `ErrorCode`."""
    metadata: Mapping[str, JsonValue]
    """The metadata of the request; empty if the request could not be read."""
    timeline: JobTimeline = JobTimeline()
    """When the parts of the job began."""
    traceparent: str | None = None
    """The span that the job belongs to, in the form of W3C Trace Context. None: there is none."""

    def measurements(self) -> dict[str, Any]:
        """Return the measurements of `request.done`."""
        reason = None if self.finish_reason is None else self.finish_reason.value
        ended = {"job_id": self.job_id, "finish_reason": reason, "error_code": self.error_code}
        times = {**asdict(self.timeline), "traceparent": self.traceparent}
        return {**ended, "metadata": dict(self.metadata), **times, **self.stats.model_dump()}


class Telemetry:
    """Counts ticks and jobs, keeps the last tick's measurements, and calls the hooks.

    Threads: the publishing thread calls `record_tick`. The I/O thread calls `attach` and `record_job`, and reads the
    counters.
    """

    def __init__(
        self, hooks: Sequence[Hook] = (), worker: str = "", *, job_hooks: Sequence[Callable[[EndedJob], None]] = ()
    ) -> None:
        """Create the telemetry of a worker.

        Args:
            hooks: They get the measurements of each tick and each job.
            worker: The id of the worker.
            job_hooks: They get each ended job. Its measurements are computed only if a hook needs them.
        """
        self._hooks = tuple(hooks)
        self._job_hooks = tuple(job_hooks)
        self._worker = worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self.last_tick: TickStats | None = None
        self.n_ticks = 0
        self._sums = TickSums()
        self.n_jobs_done = 0

    def attach(self) -> None:
        """From now on, call the hooks on the running event loop. They do not get ticks that were recorded earlier."""
        self._loop = asyncio.get_running_loop()

    @property
    def totals(self) -> TickTotals:
        """The sums over all ticks so far."""
        return self._sums.totals()

    def record_tick(self, stats: TickStats) -> None:
        """Record the measurements of a tick. Called on the publishing thread."""
        self.last_tick = stats
        self.n_ticks += 1
        self._sums.add(stats)
        if self._hooks and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                measurements = {"worker": self._worker, **stats.model_dump()}
                self._loop.call_soon_threadsafe(self._call_hooks, TICK, measurements)

    def record_job(self, ended: EndedJob) -> None:
        """Record a job whose end is stored in Redis. Called on the I/O thread."""
        self.n_jobs_done += 1
        if self._hooks:
            self._call_hooks(REQUEST_DONE, ended.measurements())
        for hook in self._job_hooks:
            try:
                hook(ended)
            except Exception:  # the exporter of spans may raise anything
                log.exception("hook.failed hook=%r measurement=%s", hook, REQUEST_DONE)

    def _call_hooks(self, name: str, measurements: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            try:
                hook(name, dict(measurements))
            except Exception:  # a user's hook may raise anything
                log.exception("hook.failed hook=%r measurement=%s", hook, name)
