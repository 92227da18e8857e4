"""Workers are stopped and started at random while jobs arrive: no job remains without a worker that could run it."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from tests.soak.chaos import draw_job, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.load import collect, record_published, run_job, run_jobs, run_with_background
from tests.soak.report import Outcome, ProgressReport

N_WORKERS = 3
WIDTH = 24
TICK_S = 0.002
MAX_TOKENS = 12
BETWEEN_S = (0.0, 0.3)
"""Range of the seconds between the start of a worker and the stop of another."""
SETTINGS: dict[str, Any] = {"n_parallel": 4, "n_ctx": 4096, "chunk_size": 64, "drain_s": 0.1}


async def closings(seed: int, report: ProgressReport, *, n_stops: int = 40) -> Outcome:
    """Stop workers by SIGTERM under load. Each worker is replaced before the next one stops."""
    checker, rng, started_s = Checker(), seeded_random(seed, "closings"), time.monotonic()
    job_rng = seeded_random(seed, "jobs")
    is_over = False
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        workers = await environment.start_ready(N_WORKERS, {"tick_s": TICK_S})
        async with environment.client() as client, record_published(client, checker):

            async def one_job() -> None:
                await run_job(client, checker, draw_job(job_rng, max_tokens=MAX_TOKENS))

            async def stop_and_start() -> None:
                nonlocal is_over
                for number in range(n_stops):
                    await asyncio.sleep(rng.uniform(*BETWEEN_S))
                    worker = workers.pop(0)
                    worker.signal(signal.SIGTERM)
                    workers.extend(await environment.start_ready(1, {"tick_s": TICK_S}))
                    await asyncio.to_thread(worker.process.wait)
                    report(number + 1, n_stops, f"workers stopped, {len(checker.accepted)} jobs")
                is_over = True
                await asyncio.Event().wait()

            await run_with_background(
                stop_and_start(), run_jobs(one_job, width=WIDTH, wants_more=lambda *_: not is_over)
            )
            await collect(client, checker)
    figures = {"workers stopped": n_stops, "jobs": len(checker.accepted)}
    return Outcome("closings", checker.judge(), figures, time.monotonic() - started_s)
