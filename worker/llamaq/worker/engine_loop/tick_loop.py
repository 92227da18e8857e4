"""The engine thread: receives commands from the I/O thread and runs ticks while there is work.

The engine thread never waits for Redis. Commands arrive through a queue, and outputs leave through a mailbox that
never blocks. The outputs of a tick are published while the next tick computes, see `Publisher`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, SlotSnapshot
from llamaq.worker.core.batch import TickBatch
from llamaq.worker.core.job import BaseJob, Lease
from llamaq.worker.core.outputs import TickOutcome
from llamaq.worker.engine_loop.command_queue import CommandQueue
from llamaq.worker.engine_loop.engine_liveness import EngineLiveness
from llamaq.worker.engine_loop.late_outputs import ComputedTick, LateOutputs
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn
from llamaq.worker.engine_loop.publication_pace import PublicationPace
from llamaq.worker.engine_loop.publisher import Publisher
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_parts_interface import BatchDrafter, JobScheduler, Runner
from llamaq.worker.engine_loop.tick_time_predictor import TickTimePredictor

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""An idle engine thread wakes up after this many seconds, to show that it is alive."""
SETTLE_S = 0.002
"""How long an engine without work waits for a command before it does anything else. The other threads need the GIL to
report the ends of the last jobs."""
SNAPSHOT_EVERY_S = 0.25
LONG_TICK_S = 0.02
"""Before a longer tick, new slots of jobs are published, so that these jobs do not count as waiting. Before a shorter
tick, this is not worth a call of Redis for each job."""
DISK_WAIT_S = 0.0005
"""Pause after a tick that computed nothing because KV cells are still read from disk or copied off the device."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The slots and the KV cells at one moment."""

    slots: tuple[SlotSnapshot, ...]
    cache: CacheSnapshot


class TickLoop:
    """Runs the ticks of one worker.

    Threads: the engine thread calls `run`. The I/O thread calls `admit`, `cancel` and `release`; these commands take
    effect before the next tick. Any thread, and a signal handler, may call `stop`. Any thread may read `snapshot`.
    """

    def __init__(
        self,
        scheduler: JobScheduler,
        engine: Runner,
        shared: SharedState,
        *,
        hang_s: float,
        capacity: int,
        stream_interval_s: float = 0.0,
        drafter: BatchDrafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the loop. `run` starts the ticks.

        Args:
            scheduler: Decides what each tick computes.
            engine: Computes the batches.
            shared: The objects that the engine thread shares with the I/O thread.
            hang_s: The shortest time, in seconds, after which a tick counts as a hang.
            capacity: Upper bound on the jobs of this worker. Surplus bulk jobs without a slot are withdrawn, so that
                other workers run them.
            stream_interval_s: Tokens of short ticks are published together, at most this many seconds after the last
                publication.
            drafter: Adds drafts to the batches. None: there is no draft model.
            clock: A monotonic clock in seconds.
        """
        self._scheduler = scheduler
        self._engine = engine
        self._drafter = drafter
        self._shared = shared
        self._capacity = capacity
        self._clock = clock
        self.commands = CommandQueue()
        """The commands of other threads, which are run between two ticks."""
        self.liveness = EngineLiveness(hang_s, clock)
        """Whether the engine thread hangs."""
        self._stop_s: float | None = None
        self._tick_times = TickTimePredictor()
        self._publisher = Publisher(shared)
        repeater = scheduler.repeater
        self._late = None if repeater is None else LateOutputs(repeater, self._publisher)
        """The outputs of repeated ticks. None: no tick is repeated."""
        self._pace = PublicationPace(stream_interval_s, self._tick_times, clock)
        self._snapshot_s = clock()
        self.snapshot = self._take_snapshot()
        """The slots and cells as of the last snapshot."""

    # ---- commands: called on any thread

    def admit(self, jobs: Sequence[BaseJob]) -> None:
        """Submit prepared jobs to the scheduler before the same tick. An idle engine begins with them at once."""
        if jobs:
            self.commands.put_and_wake(partial(self._submit, jobs))

    def cancel(self, job_id: str) -> None:
        """Cancel a job before the next tick."""
        self.commands.put(partial(self._scheduler.cancel, job_id))

    def release(self, lease: Lease) -> None:
        """Drop this attempt of a job before the next tick. Another attempt of the job stays."""
        self.commands.put(partial(self._scheduler.release, lease))

    def stop(self, grace_s: float) -> None:
        """Let `run` return when no job is left, and after `grace_s` seconds at the latest.

        A second call can shorten the time but not extend it.
        """
        until_s = self._clock() + grace_s
        self._stop_s = until_s if self._stop_s is None else min(self._stop_s, until_s)
        self.commands.put(lambda: None)  # wakes an idle engine

    # ---- the engine thread

    def run(self) -> None:
        """Run commands and ticks until stopped. May be called once."""
        with self._publisher:
            while not self._has_stopped():
                self._run_commands()
                self.liveness.show_alive()
                self._tick()
                self.liveness.end_tick()

    def _has_stopped(self) -> bool:
        if self._stop_s is None:
            return False
        # The commands that have arrived are run before the end, because their callers wait for the results.
        is_idle = not self._scheduler.has_work and self.commands.is_empty
        return is_idle or self._clock() >= self._stop_s

    def _submit(self, jobs: Sequence[BaseJob]) -> None:
        for job in jobs:
            self._scheduler.submit(job)

    def _run_commands(self) -> None:
        """Run the commands that have arrived. Without work, wait for the first one."""
        if not self._scheduler.has_work and self._stop_s is None:
            self._wait_for_command()
        self.commands.run_all()

    def _wait_for_command(self) -> None:
        """Run the next command. If none arrives within `SETTLE_S`, first take a snapshot and save cells ahead."""
        if not self.commands.run_next(SETTLE_S):
            self.snapshot = self._take_snapshot()
            self._save_ahead()
            self.commands.run_next(IDLE_WAIT_S)

    def _save_ahead(self) -> None:
        """Save cells that the next job will evict, until a command arrives or there is nothing to save now."""
        while self.commands.is_empty and self._scheduler.save_ahead():
            self.liveness.show_alive()

    def _tick(self) -> None:
        """Run one tick: decide what to compute, compute it while the last tick is published, and apply the results.

        While the next batch needs no plan, it is computed at once.
        """
        scheduler = self._scheduler
        scheduler.expire()
        self._withdraw_when_stopping()
        scheduler.admit()
        times = self._tick_times
        expected_s = times.predict_s(scheduler.n_prefill_next)
        if expected_s > LONG_TICK_S:
            self._publisher.add(scheduler.take_outputs())
        self._requeue(scheduler.withdraw_surplus(self._capacity))
        has_loaded = scheduler.move(expected_s, times.prefill_token_s)
        batch = scheduler.plan(self._shared.queue_depth.n_waiting)
        if not self._can_publish_later(batch):
            self._publish()
        batch = self._draft(batch)
        self._start_masks(batch)
        tick = self._compute(batch)
        tick = self._repeat(tick)
        outcome = scheduler.apply(tick.batch, tick.results)
        self._report(tick, outcome)
        if not (batch or outcome.outputs or has_loaded):
            time.sleep(DISK_WAIT_S)
        if self._is_snapshot_due:
            self.snapshot = self._take_snapshot()

    def _withdraw_when_stopping(self) -> None:
        """Requeue the jobs that have no slot, if this worker is stopping."""
        if self._stop_s is not None:
            self._requeue(self._scheduler.withdraw_waiting())

    def _requeue(self, jobs: Iterable[BaseJob]) -> None:
        self._publisher.add([JobWithdrawn(job) for job in jobs])

    def _can_publish_later(self, batch: TickBatch) -> bool:
        """Whether the outputs can be published with those of `batch`, because its tick will end very soon."""
        if not batch or batch.n_prefill:
            return False
        return self._pace.next_tick_is_in_time and not self._publisher.is_urgent

    def _publish(self) -> None:
        self._pace.record(self._clock())
        self._publisher.publish()

    def _draft(self, batch: TickBatch) -> TickBatch:
        """Return the batch with the drafts of the draft model."""
        if self._drafter is None:
            return batch
        started_s = self._clock()
        drafted: TickBatch = self._drafter.add_drafts(batch)
        self._pace.draft_s = self._clock() - started_s
        return drafted

    def _start_masks(self, batch: TickBatch) -> None:
        """Let the publishing thread compute the masks of grammars while the engine computes the batch."""
        if self._late is not None and (preparation := self._late.repeater.preparation(batch)) is not None:
            self._publisher.post(preparation)

    def _compute(self, batch: TickBatch) -> ComputedTick:
        """Compute the batch. An empty batch is not computed."""
        started_s = self._clock()
        results = self._engine.run(batch) if batch else []
        ended_s = self._clock()
        self._tick_times.record(batch, ended_s - started_s)
        return ComputedTick(batch, results, ended_s - started_s, ended_s)

    def _repeat(self, tick: ComputedTick) -> ComputedTick:
        """Compute the next batches without a plan, until something else has to be done.

        The outputs of each tick are made and published while the next tick is computed.

        Returns:
            The last tick, whose results the scheduler has not applied yet.
        """
        if (late := self._late) is None:
            return tick
        repeater = late.repeater
        try:
            while self._has_nothing_else_to_do() and (batch := repeater.next_batch(tick.results)) is not None:
                self._add_late(late, tick, batch)
                self.liveness.end_tick()
                tick = self._compute(batch)
                if repeater.texts_may_end:
                    late.wait()
                    if repeater.has_stopped:
                        break
        finally:
            late.finish()
        return tick

    def _add_late(self, late: LateOutputs, tick: ComputedTick, next_batch: TickBatch) -> None:
        """Add a tick to the late outputs. Begin to make them if they are due, or if the next ticks depend on them."""
        late.add(tick)
        is_due = not self._pace.next_tick_is_in_time
        if is_due:
            self._pace.record(tick.ended_s)
        if is_due or late.repeater.texts_may_end or late.repeater.can_prepare:
            late.begin(next_batch, is_due=is_due)

    def _has_nothing_else_to_do(self) -> bool:
        """Whether no command has arrived, no snapshot is due, and the loop need not end now."""
        return self.commands.is_empty and not self._is_snapshot_due and not self._has_stopped()

    def _report(self, tick: ComputedTick, outcome: TickOutcome) -> None:
        """Give the measurements and the outputs of a tick to the publisher. Publish them if no tick follows."""
        if tick.batch:
            self._publisher.add_tick(tick.batch, tick.eval_s, outcome.n_accepted)
        self._publisher.add(outcome.outputs)
        if not self._scheduler.has_work:
            self._publish()

    @property
    def _is_snapshot_due(self) -> bool:
        return self._clock() - self._snapshot_s >= SNAPSHOT_EVERY_S

    def _take_snapshot(self) -> Snapshot:
        self._snapshot_s = self._clock()
        return Snapshot(self._scheduler.snapshot(), self._scheduler.cache_snapshot())

    def __repr__(self) -> str:
        return f"<TickLoop ticks={self._shared.telemetry.n_ticks} {self._scheduler!r}>"
