"""A scheduler on a fake engine, for tests that follow jobs over many ticks."""

from __future__ import annotations

from tests.support.outputs import tokens_of

from llamaq.worker.core.outputs import JobEnded, Output
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.testing import FakeEngine, run_tick, run_to_end


class SchedulerRig:
    """Runs ticks, and collects the outputs of the jobs. `finish` fails after `max_ticks`."""

    def __init__(self, engine: FakeEngine, scheduler: Scheduler, *, max_ticks: int = 10_000) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._max_ticks = max_ticks
        self.outputs: list[Output] = []

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.outputs += run_tick(self.scheduler, self.engine)

    def finish(self) -> dict[str, JobEnded]:
        """Run until no job is left. Return the ends of all jobs by their ids."""
        self.outputs += run_to_end(self.scheduler, self.engine, max_ticks=self._max_ticks)
        return {output.job.id: output for output in self.outputs if isinstance(output, JobEnded)}

    def tokens(self, job_id: str) -> list[int]:
        return tokens_of(self.outputs, job_id)

    @property
    def running(self) -> list[str]:
        """The ids of the jobs that have a slot."""
        return sorted(slot.job_id for slot in self.scheduler.snapshot() if slot.job_id)

    @property
    def preemptions(self) -> int:
        return self.scheduler.cache_snapshot().preemptions
