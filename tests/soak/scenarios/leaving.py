"""Callers leave in the middle of a call. A job with an idempotency key runs on for its other callers."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.load import collect, read, record_published, run_jobs, submit
from tests.soak.report import Outcome, ProgressReport

from llamaq.common.background_tasks import cancel_tasks
from llamaq.producer import AsyncClient

N_WORKERS = 2
WIDTH = 20
TICK_S = 0.01
SHARED_TOKENS = 40
ENDLESS_TOKENS = 3000
"""Length of the jobs with one caller. If such a job is not cancelled, it is still in the queue when the soak ends."""
FIRST_S = 0.05
"""Seconds that the first caller is ahead, so that its call creates the job."""
LEAVES_AFTER_S = (0.0, 0.8)
"""Range of the seconds after which a caller leaves: the job waits, is in prefill, or generates."""
SETTINGS: dict[str, Any] = {"n_parallel": 4, "n_ctx": 16384, "chunk_size": 32}


async def leaving(seed: int, report: ProgressReport, *, n_jobs: int = 200) -> Outcome:
    """In half of the jobs, the first of two callers leaves. In the other half, the only caller leaves."""
    checker, rng, started_s = Checker(), seeded_random(seed, "leaving"), time.monotonic()
    numbers = iter(range(n_jobs))
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        await environment.start_ready(N_WORKERS, {"tick_s": TICK_S})
        async with environment.client() as first, environment.client() as second, record_published(second, checker):

            async def one_job() -> None:
                number = next(numbers)
                if number % 2:
                    await _leave_alone(first, rng)
                else:
                    await _leave_shared(first, second, checker, rng, f"{seed}-{number}")
                report(number + 1, n_jobs, "jobs that a caller left")

            await run_jobs(one_job, width=WIDTH, wants_more=lambda n_begun, _: n_begun < n_jobs)
            await collect(second, checker)
    return Outcome("leaving", checker.judge(), {"jobs": n_jobs}, time.monotonic() - started_s)


def _options(rng: random.Random, n_tokens: int) -> dict[str, Any]:
    tokens = rng.choices(VOCABULARY, k=64)
    return {"tokens": tokens, "max_tokens": n_tokens, "ignore_eos": True, "seed": rng.getrandbits(32)}


async def _leave_shared(
    first: AsyncClient, second: AsyncClient, checker: Checker, rng: random.Random, key: str
) -> None:
    """Submit one job from two callers. The first leaves, and the second must read the whole output."""
    options = _options(rng, SHARED_TOKENS) | {"idempotency_key": key, "stream": True}
    calling = asyncio.create_task(first.generate_tokens(**options))
    await asyncio.sleep(FIRST_S)
    shape = JobShape(options, demands={"n_tokens": SHARED_TOKENS, "ending": "length"})
    reading = asyncio.create_task(read(await submit(second, checker, shape), checker, "second caller"))
    await asyncio.sleep(rng.uniform(*LEAVES_AFTER_S))
    await cancel_tasks(calling)
    await reading


async def _leave_alone(client: AsyncClient, rng: random.Random) -> None:
    """Leave a job that has no other caller. If it is not cancelled, `collect` finds its entry in the queue."""
    calling = asyncio.create_task(client.generate_tokens(**_options(rng, ENDLESS_TOKENS)))
    await asyncio.sleep(rng.uniform(*LEAVES_AFTER_S))
    await cancel_tasks(calling)
