"""A scheduler with a fake engine and a manual clock, for tests that look at each tick."""

from __future__ import annotations

from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, Output
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy
from llamaq.worker.testing import (
    ByteVocab,
    FakeEngine,
    ManualClock,
    make_memory,
    make_scheduler,
    next_letter,
    run_tick,
    run_to_end,
)
from llamaq.worker.testing.fake_engine import NextToken

EOS = ByteVocab.eos


class TickedJobs:
    """A scheduler with a fake engine and a manual clock."""

    def __init__(
        self,
        n_slots: int = 2,
        n_ctx: int = 400,
        budget: int = 32,
        chunk_size: int = 8,
        next_token: NextToken = next_letter,
        strategy: BatchStrategy | None = None,
    ) -> None:
        self.engine = FakeEngine(n_ctx=n_ctx, n_batch=budget, n_seq_max=n_slots + 3, next_token=next_token)
        self.memory = make_memory(self.engine, n_slots=n_slots)
        self.clock = ManualClock()
        self.scheduler = make_scheduler(
            self.engine, self.memory, strategy=strategy, chunk_size=chunk_size, worker="w1", clock=self.clock
        )

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.submit(job)

    def tick(self, times: int = 1) -> list[Output]:
        return [output for _ in range(times) for output in run_tick(self.scheduler, self.engine)]

    def finish(self) -> list[Output]:
        return run_to_end(self.scheduler, self.engine)

    @property
    def running(self) -> list[str]:
        return [slot.active.job.id for slot in self.memory.active_slots]


def model_that_generates(text: str, after: int) -> NextToken:
    """Return a model that generates `text` and then an end token, if the prompt has `after` tokens."""
    tokens = [*text.encode(), EOS]
    return lambda history: tokens[len(history) - after]


def ends_of(outputs: list[Output]) -> dict[str, JobEnded]:
    return {output.job.id: output for output in outputs if isinstance(output, JobEnded)}


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, NewToken | JobEnded))


def only_end(outputs: list[Output]) -> JobEnded:
    (end,) = ends_of(outputs).values()
    assert outputs[-1] is end
    return end
