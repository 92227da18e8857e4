"""Jobs move to the worker that has a slot for them: interrupted streams, and jobs that another worker has claimed."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import POLL_S, Environment, WorkerProcess
from tests.soak.load import collect, read, record_published, submit
from tests.soak.report import Outcome, ProgressReport, percentiles

from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import AsyncClient, AsyncJob

TICK_S = 0.01
LEASE_S = 1.0
BULK_TOKENS = 3000
"""Length of a bulk job: 30 s, much longer than the time within which an interrupted stream must continue."""
STREAM_TOKENS = 400
RESUMES_WITHIN_S = LEASE_S + 4.0
STARTS_WITHIN_S = 5.0
SETTINGS: dict[str, Any] = {
    "lease_s": LEASE_S,
    "n_parallel": 2,
    "inbox_window": 2,
    "n_ctx": 32768,
    "max_crashes": 1000,
}


async def moves(seed: int, report: ProgressReport, *, n_rounds: int = 6) -> Outcome:
    """In each round, interrupt a stream beside a worker full of bulk jobs, then start a worker beside a full one."""
    checker, rng, started_s = Checker(), seeded_random(seed, "moves"), time.monotonic()
    resumed_s: list[float] = []
    first_starts_s: list[float] = []
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        async with environment.client() as client, record_published(client, checker):
            for number in range(n_rounds):
                resumed_s.append(await _interrupt_beside_bulk(environment, client, checker, rng))
                first_starts_s += await _start_beside_a_full_worker(environment, client, checker, rng)
                report(number + 1, n_rounds, "rounds")
            await collect(client, checker)
    if max(resumed_s) > RESUMES_WITHIN_S:
        checker.add_violation(f"an interrupted stream stood still for {max(resumed_s):.1f} s beside bulk jobs")
    if max(first_starts_s) > STARTS_WITHIN_S:
        checker.add_violation(f"a job waited {max(first_starts_s):.1f} s although a worker had a free slot")
    figures = {
        "from kill to the next token beside bulk jobs, s": percentiles(resumed_s),
        "from a free worker to the start of waiting jobs, s": percentiles(first_starts_s),
    }
    return Outcome("moves", checker.judge(), figures, time.monotonic() - started_s)


async def _submit(
    client: AsyncClient, checker: Checker, rng: random.Random, n_tokens: int, priority: str = "interactive"
) -> AsyncJob:
    options = {"tokens": rng.choices(VOCABULARY, k=16), "max_tokens": n_tokens, "ignore_eos": True, "seed": 1}
    demands = {"n_tokens": n_tokens, "may_be_short": True}
    return await submit(client, checker, JobShape(options | {"priority": priority}, demands=demands))


async def _interrupt_beside_bulk(
    environment: Environment, client: AsyncClient, checker: Checker, rng: random.Random
) -> float:
    """Kill the worker of a stream while the other worker is full of bulk jobs. Returns how long the stream paused."""
    (doomed,) = await environment.start_ready(1, {"tick_s": TICK_S})
    stream = await _submit(client, checker, rng, STREAM_TOKENS)
    reading = asyncio.create_task(read(stream, checker, "reader"))
    await _await_tokens(stream, 20)
    (other,) = await environment.start_ready(1, {"tick_s": TICK_S})
    bulk = [await _submit(client, checker, rng, BULK_TOKENS, "bulk") for _ in range(8)]
    await _await_full(other, bulk)
    doomed.kill()
    n_before, killed_s = (await stream.status()).generated_tokens, time.monotonic()
    await _await_tokens(stream, n_before + 1)
    paused_s = time.monotonic() - killed_s
    await reading
    await _end([*bulk], [other])
    return paused_s


async def _start_beside_a_full_worker(
    environment: Environment, client: AsyncClient, checker: Checker, rng: random.Random
) -> list[float]:
    """Let one worker claim more jobs than it has slots, and start a second. Returns the waits of the waiting jobs."""
    (full,) = await environment.start_ready(1, {"tick_s": TICK_S})
    jobs = [await _submit(client, checker, rng, BULK_TOKENS) for _ in range(SETTINGS["n_parallel"] + 2)]
    await asyncio.sleep(1.0)  # the first worker claims the waiting jobs into its window
    (free,) = await environment.start_ready(1, {"tick_s": TICK_S})
    ready_s = time.monotonic()
    starts_s: list[float] = []
    waiting = [job for job in jobs if (await job.status()).state is JobState.QUEUED]
    while waiting and time.monotonic() - ready_s < 4 * STARTS_WITHIN_S:
        still = [job for job in waiting if (await job.status()).state is JobState.QUEUED]
        starts_s += [time.monotonic() - ready_s] * (len(waiting) - len(still))
        waiting = still
        await asyncio.sleep(POLL_S)
    starts_s += [time.monotonic() - ready_s] * len(waiting)
    await _end(jobs, [full, free])
    return starts_s or [0.0]


async def _await_tokens(job: AsyncJob, count: int) -> None:
    while True:
        status = await job.status()
        if status.generated_tokens >= count or status.state is JobState.FINISHED:
            return
        await asyncio.sleep(POLL_S)


async def _await_full(worker: WorkerProcess, jobs: list[AsyncJob]) -> None:
    """Wait until every slot of a worker runs one of these jobs."""
    worker_id = await worker.ready()
    while True:
        statuses = [await job.status() for job in jobs]
        running = [status for status in statuses if status.state is JobState.RUNNING and status.worker == worker_id]
        if len(running) >= SETTINGS["n_parallel"]:
            return
        await asyncio.sleep(POLL_S)


async def _end(jobs: list[AsyncJob], workers: list[WorkerProcess]) -> None:
    """Cancel the jobs, and stop the workers when the jobs have ended."""
    for job in jobs:
        await job.cancel()
    for job in jobs:
        await job.result()
    for worker in workers:
        worker.signal(signal.SIGTERM)
    for worker in workers:
        await asyncio.to_thread(worker.process.wait)
