"""Jobs are delayed, retried, preempted, and cancelled while they are preempted, and workers are killed meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape, KillPlan, seeded_random
from tests.soak.checker import Checker
from tests.soak.child import FLAKY, MARK
from tests.soak.environment import POLL_S, Environment
from tests.soak.load import WIRE, collect, read, record_published, run_jobs, run_with_background, submit
from tests.soak.report import Outcome, ProgressReport
from tests.soak.worker_pool import WorkerPool

from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import AsyncClient, AsyncJob

SETTINGS: dict[str, Any] = {
    "lease_s": 1.0,
    "n_parallel": 2,
    "inbox_window": 2,
    "n_ctx": 2048,
    "chunk_size": 32,
    "max_crashes": 1000,  # the soak kills the workers, so no job may become a dead letter
    "retry_s": 0.02,
    "max_retry_s": 0.1,
    "checkpoint_tokens": 16,
}
TICK_S = 0.005
"""Minimum time of a tick, so that jobs run long enough to be preempted."""
N_WORKERS = 2
WIDTH = 16
"""Number of open jobs. It exceeds the slots, so that interactive jobs preempt bulk jobs."""
FULL_SIZE = 100
"""With this number of jobs or more, retries and cancels of preempted jobs must occur."""
RETRIES = 20
"""More than a job of `child.FLAKY` needs: each attempt continues after the tokens of the last."""
KINDS = ("bulk", "cancelled", "interactive", "delayed", "flaky")
"""Kinds of jobs: bulk, bulk that is cancelled when it was preempted, and interactive, delayed and failing jobs."""


@dataclass(eq=False)
class Waits:
    """Submits jobs of all kinds in turn, and reads each to its end."""

    client: AsyncClient
    checker: Checker
    rng: random.Random
    n_jobs: int
    n_begun: int = 0
    n_ended: int = 0
    cancelled: Counter[str] = field(default_factory=Counter)
    """Number of cancelled jobs that were preempted, or interrupted by the death of a worker or by a failure."""

    def wants_more(self, n_begun: int, n_open: int) -> bool:
        return n_begun < self.n_jobs

    async def one_job(self) -> None:
        kind = KINDS[self.n_begun % len(KINDS)]
        self.n_begun += 1
        job = await submit(self.client, self.checker, self._draw(kind))
        reading = asyncio.create_task(read(job, self.checker, "reader"))
        if kind == "cancelled":
            await self._cancel_when_preempted(job, reading)
        await reading
        self.n_ended += 1

    def _draw(self, kind: str) -> JobShape:
        is_bulk = kind in ("bulk", "cancelled")
        n_tokens = self.rng.randint(40, 120) if is_bulk else self.rng.randint(1, 24)
        options: dict[str, Any] = {
            "tokens": self.rng.choices(VOCABULARY, k=self.rng.randint(8, 100)),
            "max_tokens": n_tokens,
            "ignore_eos": True,
            "seed": self.rng.getrandbits(32),
            "stream": self.rng.random() < 0.7,
            "priority": "bulk" if is_bulk else "interactive",
            "retries": RETRIES if kind == "flaky" or is_bulk else 0,
            "metadata": {MARK: FLAKY} if kind == "flaky" or self.rng.random() < 0.2 * is_bulk else {},
        }
        if kind == "delayed":
            options["delay_s"] = self.rng.uniform(0.05, 0.5)
        if kind == "cancelled":
            return JobShape(options, demands={"n_tokens": n_tokens, "may_be_short": True})
        return JobShape(options, demands={"n_tokens": n_tokens, "ending": "length"})

    async def _cancel_when_preempted(self, job: AsyncJob, reading: asyncio.Task[None]) -> None:
        """Cancel a job that waits again after it had a slot. It must keep the tokens that it had then."""
        while not reading.done():
            status = await job.status()
            if status.state is JobState.QUEUED and status.started_ms and status.run_at_ms is None:
                keys = self.client.keys.of_job(job.id)
                attempt, started_attempt = await self.client.redis.hmget(keys.job, "attempt", "started_attempt")
                await job.cancel()
                self.cancelled["preempted" if attempt == started_attempt else "interrupted"] += 1
                result = await job.result()
                if len(result.tokens) < status.generated_tokens:
                    self.checker.add_violation(
                        f"{job.id}: {len(result.tokens)} tokens after its cancel, {status.generated_tokens} before"
                    )
                return
            await asyncio.sleep(POLL_S)


async def waits(seed: int, report: ProgressReport, *, n_jobs: int = 600, n_kills: int = 24) -> Outcome:
    """Run `n_jobs` jobs of all kinds, and kill workers meanwhile."""
    checker, started_s = Checker(), time.monotonic()
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        plan = KillPlan(seeded_random(seed, "kills"), n_kills)
        async with environment.client() as client, record_published(client, checker):
            load = Waits(client, checker, seeded_random(seed, "jobs"), n_jobs)

            async def one_job() -> None:
                await load.one_job()
                report(load.n_ended, n_jobs, f"jobs, {plan.done.total()} kills")

            pool = WorkerPool(environment, plan, N_WORKERS, pace=lambda: load.n_ended / n_jobs, tick_s=TICK_S)
            work = run_jobs(one_job, width=WIDTH, wants_more=load.wants_more)
            await run_with_background(pool.run(), work)
            await collect(client, checker)
    events = [event.type for job_id in checker.accepted for event in checker.events_of(job_id, WIRE)]
    n_retries, n_preempted = events.count("retried"), load.cancelled["preempted"]
    if n_jobs >= FULL_SIZE and not (n_retries and n_preempted):
        checker.add_violation(f"{n_retries} retries, and {n_preempted} cancels of preempted jobs: both must occur")
    figures = {"kills": plan.done.total(), "retries": n_retries, "cancels": dict(load.cancelled)}
    return Outcome("waits", checker.judge(), figures, time.monotonic() - started_s)
