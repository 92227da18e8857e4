"""One job kills every worker that computes it. This job becomes a dead letter, and the other jobs finish."""

from __future__ import annotations

import asyncio
import time
from asyncio import Task
from dataclasses import replace
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape, KillPlan, draw_job, seeded_random
from tests.soak.checker import Checker
from tests.soak.child import MARK, POISON
from tests.soak.environment import Environment
from tests.soak.load import collect, read, record_published, run_with_background, submit
from tests.soak.report import Outcome, ProgressReport
from tests.soak.worker_pool import WorkerPool

from llamaq.common.errors import ErrorCode
from llamaq.producer import AsyncClient

MAX_CRASHES = 3
N_WORKERS = 2
TICK_S = 0.005
LIST_EVERY_S = 0.2


async def poison(seed: int, report: ProgressReport, *, n_jobs: int = 100, lease_s: float = 1.0) -> Outcome:
    """Submit `n_jobs` good jobs and one poisonous job at the same time."""
    checker, rng, started_s = Checker(), seeded_random(seed, "poison"), time.monotonic()
    shapes = [replace(draw_job(rng), n_readers=1) for _ in range(n_jobs)]
    poisonous = JobShape(
        {"tokens": rng.choices(VOCABULARY, k=40), "max_tokens": 8, "seed": 1, "metadata": {MARK: POISON}},
        demands={"n_tokens": 0, "ending": f"failed {ErrorCode.POISON}"},
    )
    shapes.insert(rng.randrange(n_jobs // 2), poisonous)
    settings = {"lease_s": lease_s, "max_crashes": MAX_CRASHES, "n_parallel": 4, "n_ctx": 4096, "chunk_size": 32}
    plan = KillPlan(rng, 0)
    async with Environment(settings=settings) as environment:
        environment.use_random_model()
        async with environment.client() as client, record_published(client, checker):
            pool = WorkerPool(environment, plan, N_WORKERS, pace=lambda: 0.0, tick_s=TICK_S)
            work = run_with_background(_list_workers(client), _run_all(client, checker, shapes, report))
            await run_with_background(pool.run(), work)
            await collect(client, checker)
            dead_letters: Any = await client.redis.xrange(client.keys.dead(client.queue, 0))
    guilty = [job_id for job_id, accepted in checker.accepted.items() if accepted.ending == poisonous.demands["ending"]]
    if (dead := [fields[b"job"].decode() for _, fields in dead_letters]) != guilty:
        reasons = [fields[b"reason"].decode() for _, fields in dead_letters]
        checker.add_violation(f"the dead letters are {dead} instead of {guilty}: {reasons}; {pool.accidents}")
    n_deaths = plan.done[POISON]
    if n_deaths != MAX_CRASHES:
        checker.add_violation(f"{n_deaths} workers died of the poisonous job instead of {MAX_CRASHES}")
    figures = {"good jobs": n_jobs, "workers that died": n_deaths, "max_crashes": MAX_CRASHES}
    return Outcome("poison", checker.judge(), figures, time.monotonic() - started_s)


async def _list_workers(client: AsyncClient) -> None:
    """List the workers again and again, as HTTP servers and `llamaq top` do."""
    while True:
        await client.workers()
        await asyncio.sleep(LIST_EVERY_S)


async def _run_all(client: AsyncClient, checker: Checker, shapes: list[JobShape], report: ProgressReport) -> None:
    """Submit jobs of these shapes in order, and read each job to its end."""
    readings: list[Task[None]] = []
    async with asyncio.TaskGroup() as tasks:
        for shape in shapes:
            job = await submit(client, checker, shape)
            readings.append(tasks.create_task(read(job, checker, "reader")))
            readings[-1].add_done_callback(lambda _: report(sum(map(Task.done, readings)), len(shapes), "jobs"))
