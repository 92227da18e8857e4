"""A Redis that reaches `maxmemory` refuses new jobs, but lets the accepted jobs start, end and be cancelled."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from tests.soak.chaos import VOCABULARY, JobShape, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import POLL_S, Environment
from tests.soak.load import collect, submit
from tests.soak.report import Outcome, ProgressReport
from tests.support.ports import reserve_port
from tests.support.redis_servers import Server

from llamaq.common.errors import LlamaqError, RedisFull
from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import AsyncClient, AsyncJob

N_WORKERS = 2
TICK_S = 0.005
PROMPT_TOKENS = 400
MAX_TOKENS = 12
CANCELLED_SHARE = 0.1
MIN_MEGABYTES = 4
"""Redis needs about two megabytes for itself, for the scripts and for the connections of the workers."""
TIMEOUT_S = 120.0
SETTINGS: dict[str, Any] = {"n_parallel": 4, "inbox_window": 2, "n_ctx": 8192}


async def full(seed: int, report: ProgressReport, *, megabytes: int = 8) -> Outcome:
    """Submit jobs until Redis refuses one, cancel a tenth of them, and wait until every accepted job has ended."""
    checker, rng, started_s = Checker(), seeded_random(seed, "full"), time.monotonic()
    options = ("--save", "", "--maxmemory", f"{max(MIN_MEGABYTES, megabytes)}mb", "--maxmemory-policy", "noeviction")
    with tempfile.TemporaryDirectory(prefix="lq-soak-") as folder:
        server = Server(Path(folder), reserve_port(), options)
        server.start()
        try:
            async with Environment(redis_url=f"redis://127.0.0.1:{server.port}/0", settings=SETTINGS) as environment:
                environment.use_random_model()
                await environment.start_ready(N_WORKERS, {"tick_s": TICK_S})
                async with environment.client() as client:
                    jobs = await _fill(client, checker, rng)
                    n_cancelled = await _cancel_some(jobs, checker, rng)
                    most_claimed = await _await_ends(jobs, checker, report)
                    await collect(client, checker)
        finally:
            server.kill()
    figures = {"jobs accepted": len(jobs), "cancelled": n_cancelled, "most jobs claimed at once": most_claimed}
    return Outcome("full", checker.judge(), figures, time.monotonic() - started_s)


async def _fill(client: AsyncClient, checker: Checker, rng: random.Random) -> list[AsyncJob]:
    """Submit jobs until Redis is full, and return the accepted jobs."""
    jobs: list[AsyncJob] = []

    async def submit_until_full() -> None:
        while True:
            tokens = rng.choices(VOCABULARY, k=PROMPT_TOKENS)
            options = {"tokens": tokens, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 1}
            demands = {"n_tokens": MAX_TOKENS, "may_be_short": True}
            try:
                jobs.append(await submit(client, checker, JobShape(options, demands=demands)))
            except RedisFull:
                return

    await asyncio.gather(*(submit_until_full() for _ in range(32)))
    return jobs


async def _cancel_some(jobs: list[AsyncJob], checker: Checker, rng: random.Random) -> int:
    """Cancel a tenth of the jobs. Every cancel must get through. Returns the number of cancelled jobs."""
    chosen = rng.sample(jobs, max(1, int(len(jobs) * CANCELLED_SHARE)))
    for job in chosen:
        try:
            await job.cancel()
        except (LlamaqError, RedisError) as exc:
            checker.add_violation(f"{job.id}: the cancel was refused: {exc!r}")
    return len(chosen)


async def _await_ends(jobs: list[AsyncJob], checker: Checker, report: ProgressReport) -> int:
    """Wait until all jobs have ended. Returns the largest number of jobs that workers had claimed at once."""
    capacity = N_WORKERS * (SETTINGS["n_parallel"] + SETTINGS["inbox_window"])
    deadline_s, most, open_jobs = time.monotonic() + TIMEOUT_S, 0, jobs
    while open_jobs and time.monotonic() < deadline_s:
        statuses = [await job.status() for job in open_jobs]
        ended = (JobState.FINISHED, JobState.FAILED)
        open_jobs = [job for job, status in zip(open_jobs, statuses, strict=True) if status.state not in ended]
        most = max(most, sum(status.state is JobState.RUNNING for status in statuses))
        report(len(jobs) - len(open_jobs), len(jobs), "jobs ended")
        await asyncio.sleep(POLL_S)
    if most > capacity:
        checker.add_violation(f"{most} jobs ran at once with a capacity of {capacity}")
    for job in open_jobs:
        checker.add_violation(f"{job.id}: has not ended within {TIMEOUT_S:g} s in a full Redis")
    return most
