"""A worker process that kills itself at a given point: `python child.py FAULTS`, with its settings on stdin.

It runs llamaq's real code, beginning with the entry point. Wrappers around some methods are the points at which it can
die. From SIGUSR1 on, each wrapper counts how often execution reaches its point. At the configured count, the wrapper
sends SIGKILL to this process, so no further instruction runs. The last line on stderr then names the point. Wrappers
can also slow down the ticks of the worker, and record when a job is cancelled and when its slot becomes free.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.claim_scripts import ClaimScripts
from llamaq.common.protocol.script_types import Attempt, FinishReply, JobFlush
from llamaq.worker.broker.job_claims import ClaimReply, JobClaims
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.core.batch import Batch, PrefillChunk, SlotResult
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.process import child_main
from llamaq.worker.scheduling.scheduler import Scheduler

MARK = "soak"
"""Metadata field of a job. Its value `POISON` makes the worker die when it computes the job. Its value `FLAKY` makes a
part of the attempts fail."""
POISON, FLAKY = "poison", "flaky"
FAILING_SHARE = 0.03
"""Share of the ticks of a `FLAKY` job that fail, so that half of the attempts with 24 ticks do."""


class Faults:
    """The faults that this worker simulates, and its record of events."""

    def __init__(self, *, point: str = "", passes: int = 1, tick_s: float = 0.0, record: str = "") -> None:
        """Prepare the faults.

        Args:
            point: The point where the worker kills itself. Empty: the worker does not kill itself.
            passes: The worker dies when it reaches `point` for this many times, counted from SIGUSR1 on.
            tick_s: Minimum time of a tick in seconds.
            record: File for the record of events. Empty: no record.
        """
        self.point = point
        self.is_live = False
        self.tick_s = tick_s
        self._passes = passes
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if record else None

    def reach(self, *points: str) -> None:
        """Record that execution has reached these points. Dies if this was the last allowed time for `self.point`."""
        if self.is_live and self.point in points:
            self._passes -= 1
            if self._passes <= 0:
                self.die(self.point)

    def go_live(self, *_: object) -> None:
        """Count from now on how often execution reaches `self.point`. This is the handler of SIGUSR1."""
        self.is_live = True

    def die(self, why: str) -> None:
        os.write(2, f"\nsoak.killed point={why}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, what: str, **values: object) -> None:
        """Write an event to the record as one line, in a single write call, so that lines of threads do not mix."""
        if self._record is not None:
            os.write(self._record, json.dumps({"what": what, **values}).encode() + b"\n")


def after_async(owner: type, name: str, callback: Callable[..., object]) -> None:
    """Wrap a coroutine method: each call passes its result and arguments to `callback` before it returns."""
    original: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @wraps(original)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        outcome = await original(*args, **kwargs)
        callback(outcome, *args[1:])
        return outcome

    setattr(owner, name, watched)


def add_io_points(faults: Faults) -> None:
    """Add the points of the I/O thread: Redis has executed a command, but the worker has not processed the reply."""

    def claimed(replies: Sequence[ClaimReply], *_: object) -> None:
        if replies:
            faults.reach("admit.claimed")
        claimed_jobs([reply.outcome for reply in replies])

    def reclaimed(claims: Sequence[object], *_: object) -> None:
        if claims:
            faults.reach("reclaim.claimed")

    def claimed_jobs(outcomes: Sequence[object], *_: object, **__: object) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Attempt):
                faults.reach("admit.started", "reclaim.started" if outcome.number > 1 else "")

    def flushed(_: object, flushes: Sequence[JobFlush], *__: object) -> None:
        if any(flush.payload for flush in flushes):
            faults.reach("publish.flushed")

    def finished(outcomes: Sequence[object], *_: object) -> None:
        for outcome in outcomes:
            if isinstance(outcome, FinishReply) and outcome.code == "ok":
                faults.reach("publish.finished")

    after_async(JobClaims, "read", claimed)
    after_async(JobClaims, "wait_and_read", claimed)
    after_async(JobClaims, "reclaim", reclaimed)
    after_async(ClaimScripts, "claim_jobs", claimed_jobs)
    after_async(WorkerScripts, "flush", flushed)
    after_async(WorkerScripts, "finish_jobs", finished)
    original = TickLoop.admit

    @wraps(original)
    def admit(self: TickLoop, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        faults.reach("admit.handed")

    TickLoop.admit = admit  # type: ignore[method-assign]


def phases_of(batch: Batch) -> set[str]:
    """Return the phases in a batch: `prefill` for a chunk that is not the last of its prompt, else `decode`."""
    return {"prefill" if isinstance(part, PrefillChunk) and not part.is_last else "decode" for part in batch.parts}


FAILURE = JobRejected(ErrorCode.DECODE_FAILED, "the soak lets this attempt fail")


def fails(result: SlotResult) -> bool:
    """Draw whether the attempt of a `FLAKY` job fails now."""
    is_flaky = result.slot.active.job.request.metadata.get(MARK) == FLAKY
    return is_flaky and bool(result.sampled) and random.random() < FAILING_SHARE


def add_engine_points(faults: Faults) -> None:
    """Add the points of the engine thread, before and after a batch is computed."""
    original = Engine.run

    @wraps(original)
    def run(self: Engine, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        phases = phases_of(batch)
        runs = {part.slot.active.job.id: part.slot.active for part in batch.parts}
        if any(one.job.request.metadata.get(MARK) == POISON for one in runs.values()):
            faults.die("poison")
        faults.note("tick", jobs={job_id: one.n_past for job_id, one in runs.items()}, at=time.monotonic())
        faults.reach(*(f"{phase}.before" for phase in phases))
        time.sleep(faults.tick_s)
        results = original(self, batch, *args, **kwargs)
        faults.reach(*(f"{phase}.after" for phase in phases))
        return [result._replace(sampled=(), error=FAILURE) if fails(result) else result for result in results]

    Engine.run = run  # type: ignore[method-assign]


def record_cancels(faults: Faults) -> None:
    """Record when each cancel arrives at the engine thread, and the slot's state when the scheduler applies it."""
    original_loop_cancel, original_scheduler_cancel = TickLoop.cancel, Scheduler.cancel

    @wraps(original_loop_cancel)
    def cancel(self: TickLoop, job_id: str) -> None:
        faults.note("cancel.arrived", job=job_id, at=time.monotonic())
        original_loop_cancel(self, job_id)

    @wraps(original_scheduler_cancel)
    def applied(self: Scheduler, job_id: str) -> bool:
        before = {slot.job_id: slot.state for slot in self.snapshot()}
        found = original_scheduler_cancel(self, job_id)
        after = {slot.job_id for slot in self.snapshot()}
        state = before.get(job_id, "waiting" if found else "gone")
        faults.note("cancel.applied", job=job_id, state=state, freed=job_id not in after, at=time.monotonic())
        return found

    TickLoop.cancel = cancel  # type: ignore[method-assign]
    Scheduler.cancel = applied  # type: ignore[method-assign]


def main() -> int:
    """Run the worker with its faults, and return its exit code if no fault kills it."""
    faults = Faults(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGUSR1, faults.go_live)
    add_io_points(faults)
    add_engine_points(faults)
    record_cancels(faults)
    return child_main.main()


if __name__ == "__main__":
    sys.exit(main())
