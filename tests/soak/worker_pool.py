"""A pool of a fixed number of workers. Each dies as planned, and is replaced at once."""

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
"""Seconds after which a worker that has not reached its point is killed from outside."""
SOON_S = (0.0, 0.5)
"""When a worker that is to be killed from outside dies, after its turn has come."""
MAX_ACCIDENTS = 3


@dataclass(eq=False)
class Post:
    """A place in the pool and the worker that fills it."""

    worker: WorkerProcess
    due_s: float | None = None
    """When it is killed from outside at the latest; None until its turn to die has come."""


@dataclass(eq=False)
class WorkerPool:
    """Keeps `size` workers alive, and kills them by the plan. `pace` is the progress of the load, from 0 to 1."""

    environment: Environment
    plan: KillPlan
    size: int
    pace: Callable[[], float]
    tick_s: float = 0.0
    posts: list[Post] = field(default_factory=list)
    accidents: list[str] = field(default_factory=list)
    """Ends of workers that were not planned."""

    async def run(self) -> None:
        """Until cancelled; raises `RuntimeError` when workers end that should not."""
        for _ in range(self.size):
            self.posts.append(Post(self._hire()))
        while True:
            for post in self.posts:
                self._look_after(post)
            if len(self.accidents) >= MAX_ACCIDENTS:
                raise RuntimeError("; ".join(self.accidents))
            await asyncio.sleep(POLL_S)

    def _hire(self) -> WorkerProcess:
        arms: dict[str, Any] = self.plan.arms([post.worker.arms for post in self.posts if post.worker.is_running])
        return self.environment.start(arms | {"tick_s": self.tick_s})

    def _look_after(self, post: Post) -> None:
        worker = post.worker
        if not worker.is_running:
            self._note_end(worker)
            post.worker, post.due_s = self._hire(), None
        elif "point" not in worker.arms:
            return
        elif post.due_s is None:
            if self._is_time_for_another() and worker.worker_id is not None:
                worker.signal(signal.SIGUSR1)
                patience_s = self.plan.rng.uniform(*SOON_S) if worker.arms["point"] == OUTSIDE else OVERDUE_S
                post.due_s = time.monotonic() + patience_s
        elif time.monotonic() > post.due_s:
            worker.kill()

    def _is_time_for_another(self) -> bool:
        """Whether one more worker must die at the current pace."""
        n_doomed = self.plan.n_done + sum(post.due_s is not None for post in self.posts)
        return n_doomed <= self.plan.n_kills * self.pace()

    def _note_end(self, worker: WorkerProcess) -> None:
        point = worker.killed_at or (OUTSIDE if worker.killed_from_outside else None)
        if point is None:
            self.accidents.append(f"{worker!r}: {worker.log[-1500:]}")
        else:
            self.plan.note(point)
