"""A pool of a fixed number of workers. The pool kills workers by a plan and replaces each dead worker at once."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.soak.chaos import OUTSIDE, KillPlan
from tests.soak.environment import POLL_S, Environment, WorkerProcess

OVERDUE_S = 20.0
"""Seconds after SIGUSR1 within which a worker must reach its point. Otherwise the pool kills it."""
OUTSIDE_DELAY_S = (0.0, 0.5)
"""Range of the seconds after which the pool kills a worker that is planned to die from outside."""
MAX_ACCIDENTS = 3


@dataclass(eq=False)
class PoolMember:
    """A place in the pool, and the worker that it has now."""

    worker: WorkerProcess
    due_s: float | None = None
    """Time at which the pool kills the worker. None until the worker is selected to die."""


@dataclass(eq=False)
class WorkerPool:
    """Keeps `size` workers running, and kills them as planned. `pace` returns the progress of the load, from 0 to 1."""

    environment: Environment
    plan: KillPlan
    size: int
    pace: Callable[[], float]
    tick_s: float = 0.0
    members: list[PoolMember] = field(default_factory=list)
    accidents: list[str] = field(default_factory=list)
    """Descriptions of workers that ended although the plan did not kill them."""

    async def run(self) -> None:
        """Keep the pool running until cancelled.

        Raises:
            RuntimeError: `MAX_ACCIDENTS` workers ended although the plan did not kill them.
        """
        for _ in range(self.size):
            self.members.append(PoolMember(self._start_worker()))
        while True:
            for member in self.members:
                self._replace_or_kill(member)
            if len(self.accidents) >= MAX_ACCIDENTS:
                raise RuntimeError("; ".join(self.accidents))
            await asyncio.sleep(POLL_S)

    def _start_worker(self) -> WorkerProcess:
        faults: dict[str, Any] = self.plan.faults(
            [member.worker.faults for member in self.members if member.worker.is_running]
        )
        return self.environment.start(faults | {"tick_s": self.tick_s})

    def _replace_or_kill(self, member: PoolMember) -> None:
        worker = member.worker
        if not worker.is_running:
            self._note_end(worker)
            member.worker, member.due_s = self._start_worker(), None
        elif "point" not in worker.faults:
            return
        elif member.due_s is None:
            if self._is_behind_plan() and worker.worker_id is not None:
                worker.signal(signal.SIGUSR1)
                delay_s = self.plan.rng.uniform(*OUTSIDE_DELAY_S) if worker.faults["point"] == OUTSIDE else OVERDUE_S
                member.due_s = time.monotonic() + delay_s
        elif time.monotonic() > member.due_s:
            worker.kill()

    def _is_behind_plan(self) -> bool:
        """Whether one more worker must die to keep up with `pace`."""
        n_begun = self.plan.n_done + sum(member.due_s is not None for member in self.members)
        return n_begun <= self.plan.n_kills * self.pace()

    def _note_end(self, worker: WorkerProcess) -> None:
        point = worker.killed_at or (OUTSIDE if worker.killed_from_outside else None)
        if point is None:
            self.accidents.append(f"{worker!r}: {worker.log[-1500:]}")
        else:
            self.plan.note(point)
