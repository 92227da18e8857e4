"""An ordinary worker process that kills itself at a given point: `python child.py ARMS`, with its settings on stdin.

It runs the product's own code from its entry point on. Wrappers around some methods count their passes from SIGUSR1 on.
At the last count a wrapper sends SIGKILL to this process, so no further instruction runs. The last line on stderr names
that point. At the same points a worker can slow down its ticks, or record the cost of a
cancelled job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

from llamaq.common.protocol.script_calls import Attempt, Increment, Scripts
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.core.batch import Batch, PrefillChunk
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.process import child_main
from llamaq.worker.scheduling.scheduler import Scheduler

MARK = "soak"
"""A job with this metadata field is poisoned."""
POISON = "poison"


class Arms:
    """The failures that this worker simulates."""

    def __init__(self, *, point: str = "", passes: int = 1, tick_s: float = 0.0, record: str = "") -> None:
        """Die at the `passes`th pass of `point` after SIGUSR1; ticks take at least `tick_s`; write to file `record`."""
        self.point = point
        self.is_live = False
        self.tick_s = tick_s
        self._passes = passes
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if record else None

    def reach(self, *points: str) -> None:
        """Count a pass of these points; die at the last one."""
        if self.is_live and self.point in points:
            self._passes -= 1
            if self._passes <= 0:
                self.die(self.point)

    def go_live(self, *_: object) -> None:
        """Count passes from now on."""
        self.is_live = True

    def die(self, why: str) -> None:
        os.write(2, f"\nsoak.killed point={why}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, what: str, **values: object) -> None:
        """Write a line about an event. Lines from all threads are whole and in order."""
        if self._record is not None:
            os.write(self._record, json.dumps({"what": what, **values}).encode() + b"\n")


def after_async(owner: type, name: str, callback: Callable[..., object]) -> None:
    """Call `callback` with the result and the arguments of a coroutine method, before its caller gets the result."""
    original: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @wraps(original)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        outcome = await original(*args, **kwargs)
        callback(outcome, *args[1:])
        return outcome

    setattr(owner, name, watched)


def arm_io(arms: Arms) -> None:
    """Add the points of the I/O thread: Redis has executed a command, and the worker has no answer yet."""

    def claimed(claims: Sequence[object], *_: object) -> None:
        if claims:
            arms.reach("admit.claimed")

    def reclaimed(claims: Sequence[object], *_: object) -> None:
        if claims:
            arms.reach("reclaim.claimed")

    def started(outcome: object, *_: object) -> None:
        if isinstance(outcome, Attempt):
            arms.reach("admit.started", "reclaim.started" if outcome.number > 1 else "")

    def flushed(_: object, worker: str, increments: Sequence[Increment], *__: object) -> None:
        if any(increment.payload for increment in increments):
            arms.reach("publish.flushed")

    def finished(outcome: object, *_: object) -> None:
        if outcome == "ok":
            arms.reach("publish.finished")

    after_async(JobClaims, "claim", claimed)
    after_async(JobClaims, "reclaim", reclaimed)
    after_async(Scripts, "start", started)
    after_async(Scripts, "flush", flushed)
    after_async(Scripts, "finish", finished)
    original = TickLoop.admit

    @wraps(original)
    def admit(self: TickLoop, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        arms.reach("admit.handed")

    TickLoop.admit = admit  # type: ignore[method-assign]


def kinds_of(batch: Batch) -> set[str]:
    """Return the phases in a batch: `prefill` for a chunk that is not the last of its prompt, else `decode`."""
    return {"prefill" if isinstance(part, PrefillChunk) and not part.is_last else "decode" for part in batch.parts}


def arm_engine(arms: Arms) -> None:
    """Add the points of the engine thread, before and after a batch is computed."""
    original = Engine.run

    @wraps(original)
    def run(self: Engine, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        kinds = kinds_of(batch)
        runs = {part.slot.active.job.id: part.slot.active for part in batch.parts}
        if any(one.job.request.metadata.get(MARK) == POISON for one in runs.values()):
            arms.die("poison")
        arms.note("tick", jobs={job_id: one.n_past for job_id, one in runs.items()}, at=time.monotonic())
        arms.reach(*(f"{kind}.before" for kind in kinds))
        time.sleep(arms.tick_s)
        results = original(self, batch, *args, **kwargs)
        arms.reach(*(f"{kind}.after" for kind in kinds))
        return results

    Engine.run = run  # type: ignore[method-assign]


def record_cancels(arms: Arms) -> None:
    """Record when each cancel arrives at the engine and when the scheduler applies it, with the slots' states then."""
    arrive, take = TickLoop.cancel, Scheduler.cancel

    @wraps(arrive)
    def cancel(self: TickLoop, job_id: str) -> None:
        arms.note("cancel.arrived", job=job_id, at=time.monotonic())
        arrive(self, job_id)

    @wraps(take)
    def taken(self: Scheduler, job_id: str) -> bool:
        before = {slot.job_id: slot.state for slot in self.snapshot()}
        found = take(self, job_id)
        after = {slot.job_id for slot in self.snapshot()}
        state = before.get(job_id, "waiting" if found else "gone")
        arms.note("cancel.taken", job=job_id, state=state, freed=job_id not in after, at=time.monotonic())
        return found

    TickLoop.cancel = cancel  # type: ignore[method-assign]
    Scheduler.cancel = taken  # type: ignore[method-assign]


def main() -> int:
    """Run the worker with its arms; return its exit code, unless it is killed before."""
    arms = Arms(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGUSR1, arms.go_live)
    arm_io(arms)
    arm_engine(arms)
    record_cancels(arms)
    return child_main.main()


if __name__ == "__main__":
    sys.exit(main())
