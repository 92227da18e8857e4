"""Bulk jobs beside an interactive load that keeps every slot busy: they get their share, and are seldom preempted."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.load import collect, read, record_published, run_jobs, submit
from tests.soak.report import Outcome, ProgressReport, percentiles

from llamaq.producer import AsyncClient

TICK_S = 0.01
N_INTERACTIVE = 6
"""Interactive jobs that are open at a time: three for each slot."""
INTERACTIVE_TOKENS, BULK_TOKENS = 20, 300
MAX_ATTEMPTS = 10
"""Largest allowed number of attempts of a bulk job."""
TIMEOUT_S = 240.0
SETTINGS: dict[str, Any] = {"n_parallel": 2, "inbox_window": 2, "n_ctx": 8192, "bulk_share": 0.2}


async def shares(seed: int, report: ProgressReport, *, n_bulk: int = 4) -> Outcome:
    """Run bulk jobs beside an interactive load, and wait until all bulk jobs have finished."""
    checker, rng, started_s = Checker(), seeded_random(seed, "shares"), time.monotonic()
    waits_ms: list[float] = []
    is_over = False
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        await environment.start_ready(1, {"tick_s": TICK_S})
        async with environment.client() as client, record_published(client, checker):

            async def one_interactive() -> None:
                job = await submit(client, checker, _shape(rng, "interactive", INTERACTIVE_TOKENS))
                await read(job, checker, "reader")
                waits_ms.append((await job.result()).stats.queue_ms)

            async def all_bulk() -> list[int]:
                nonlocal is_over
                try:
                    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
                        bulk = [tasks.create_task(_one_bulk(client, checker, rng)) for _ in range(n_bulk)]
                        for task in bulk:
                            task.add_done_callback(lambda _: report(sum(map(asyncio.Task.done, bulk)), n_bulk, "bulk"))
                    return [task.result() for task in bulk]
                except TimeoutError:
                    checker.add_violation(f"the bulk jobs have not finished within {TIMEOUT_S:g} s")
                    return []
                finally:
                    is_over = True

            running = asyncio.create_task(all_bulk())
            await run_jobs(one_interactive, width=N_INTERACTIVE, wants_more=lambda *_: not is_over)
            attempts = await running
            await collect(client, checker)
    if max(attempts, default=0) > MAX_ATTEMPTS:
        checker.add_violation(f"a bulk job had {max(attempts)} attempts")
    figures = {
        "attempts of the bulk jobs": attempts,
        "interactive jobs": len(waits_ms),
        "wait of an interactive job, ms": percentiles(waits_ms, 0),
    }
    return Outcome("shares", checker.judge(), figures, time.monotonic() - started_s)


def _shape(rng: random.Random, priority: str, n_tokens: int) -> JobShape:
    options = {
        "tokens": rng.choices(VOCABULARY, k=32),
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "seed": 1,
        "priority": priority,
    }
    return JobShape(options, demands={"n_tokens": n_tokens, "ending": "length"})


async def _one_bulk(client: AsyncClient, checker: Checker, rng: random.Random) -> int:
    """Run a bulk job to its end. Returns the number of its attempts."""
    job = await submit(client, checker, _shape(rng, "bulk", BULK_TOKENS))
    await read(job, checker, "reader")
    return (await job.status()).attempt
