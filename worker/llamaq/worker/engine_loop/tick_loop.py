"""The engine thread: it receives commands from the I/O thread, and runs ticks while there is work.

It never waits for Redis: commands come through a queue, and outputs leave through a call that does not block.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from llamaq.common.protocol.queue_state import CacheSnapshot, SlotSnapshot, TickStats
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.job import Job, Output
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_times import TickTimes
from llamaq.worker.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_WAIT_S = 1.0
"""An idle engine thread wakes up this often, to show that it is alive."""
SNAPSHOT_EVERY_S = 0.25
DISK_WAIT_S = 0.0005
"""A pause where nothing can be computed before something is read from disk, or has left the device."""
SLOW_TICKS = 4
"""A tick is a hang only when it takes longer than this many of the slowest ticks seen."""


class Runner(Protocol):
    """What runs a batch: the engine, or the fake one in tests."""

    def run(self, batch: Batch) -> list[SlotResult]:
        """Decode and sample."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The slots and cells as the engine thread last showed them."""

    slots: tuple[SlotSnapshot, ...]
    cache: CacheSnapshot


class TickLoop:
    """Runs the ticks of one worker on the thread that calls `run`. Everything else may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Runner,
        telemetry: Telemetry,
        *,
        hang_s: float,
        capacity: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of more than `capacity` jobs, bulk jobs that have no slot are given up, for other workers."""
        self._scheduler = scheduler
        self._capacity = capacity
        self._engine = engine
        self._telemetry = telemetry
        self._hang_s = hang_s
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stop_s: float | None = None
        self.stamp_s = clock()
        """When the last tick began, or the idle engine last woke up."""
        self._slowest_tick_s = 0.0
        self._times = TickTimes()
        self._shown_s = -SNAPSHOT_EVERY_S
        self.queue_depth = 0
        """Jobs that wait in Redis, as the I/O thread last saw it."""
        self.put: Callable[[list[Output]], None] = lambda _: None
        """Where outputs go; must not block."""
        self.give_up: Callable[[list[Job]], None] = lambda _: None
        """Where jobs go that this worker will not go on with; must not block."""
        self.snapshot = self._look()

    def admit(self, job: Job) -> None:
        """Give a prepared job to the scheduler."""
        self._commands.put(partial(self._scheduler.submit, job))

    def cancel(self, job_id: str) -> None:
        """End a job as cancelled before the next tick."""
        self._commands.put(partial(self._scheduler.cancel, job_id))

    def release(self, job_id: str, attempt: int) -> None:
        """Drop this attempt of a job: it belongs to a newer one, which may run here too."""
        self._commands.put(partial(self._scheduler.release, job_id, before_attempt=attempt + 1))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have something done before the next tick. What comes of it, an error too, is in the future."""
        future: Future[T] = Future()

        def carry_out() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as exc:  # noqa: BLE001 - whoever asked for it gets it
                    future.set_exception(exc)

        self._commands.put(carry_out)
        return future

    def stop(self, grace_s: float) -> None:
        """Return from `run` when no job is left, and after `grace_s` at the latest; a second call may shorten it."""
        until_s = self._clock() + grace_s
        self._stop_s = until_s if self._stop_s is None else min(self._stop_s, until_s)
        self._commands.put(lambda: None)

    @property
    def is_alive(self) -> bool:
        """Whether the last tick is recent enough to believe that the next one will come."""
        return self.age_s < self.patience_s

    @property
    def patience_s(self) -> float:
        """How long a tick may take before it is a hang."""
        return max(self._hang_s, SLOW_TICKS * self._slowest_tick_s)

    @property
    def age_s(self) -> float:
        """How long ago the last tick began."""
        return self._clock() - self.stamp_s

    def run(self) -> None:
        """Receive and tick until stopped."""
        while not self._is_over():
            self._receive()
            started_s = self.stamp_s = self._clock()
            self._tick()
            self._slowest_tick_s = max(self._slowest_tick_s, self._clock() - started_s)

    def _is_over(self) -> bool:
        if self._stop_s is None:
            return False
        return not self._scheduler.has_work or self._clock() >= self._stop_s

    def _receive(self) -> None:
        """Run the commands that are there; without work wait for one."""
        try:
            if not self._scheduler.has_work and self._stop_s is None:
                self._commands.get(timeout=IDLE_WAIT_S)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _tick(self) -> None:
        scheduler = self._scheduler
        scheduler.expire()
        if self._stop_s is not None:
            self.give_up(scheduler.withdraw())
        scheduler.admit()
        if self._capacity is not None:
            self.give_up(scheduler.shed(self._capacity))
        has_loaded = scheduler.move(self._times.guess(scheduler.n_prefill_next))
        batch = scheduler.plan(self.queue_depth)
        started_s = self._clock()
        results = self._engine.run(batch) if batch else []
        eval_s = self._clock() - started_s
        self._times.saw(batch, eval_s)
        outputs = scheduler.apply(batch, results)
        if batch:  # before the outputs leave: hooks hear of a job's end after its last tick
            self._telemetry.tick(self._measure(batch, eval_s))
        self.put(outputs)
        if not (batch or outputs or has_loaded):
            time.sleep(DISK_WAIT_S)
        if not scheduler.has_work or self._clock() - self._shown_s >= SNAPSHOT_EVERY_S:
            self.snapshot = self._look()

    def _measure(self, batch: Batch, eval_s: float) -> TickStats:
        return TickStats.model_construct(  # our own numbers, once a tick: not validated
            batch_size=batch.n_tokens,
            decode_tokens=batch.n_decode,
            prefill_tokens=batch.n_prefill,
            active_slots=len(batch.parts),
            queue_depth=self.queue_depth,
            eval_ms=eval_s * 1000,
        )

    def _look(self) -> Snapshot:
        self._shown_s = self._clock()
        return Snapshot(self._scheduler.snapshot(), self._scheduler.cache_snapshot())

    def __repr__(self) -> str:
        return f"<TickLoop ticks={self._telemetry.ticks} {self._scheduler!r}>"
