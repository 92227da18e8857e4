"""Redis or the connection to it fails while jobs are submitted, run and read: every acknowledged job finishes."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from redis.exceptions import RedisError
from tests.soak.chaos import draw_job, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment, wait_until
from tests.soak.load import collect, read, run_jobs, submit
from tests.soak.report import Outcome, ProgressReport
from tests.support.ports import reserve_port
from tests.support.redis_servers import Server
from tests.support.tcp_proxy import Proxy

from llamaq.producer import AsyncClient

DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
N_WORKERS = 2
WIDTH = 24
TICK_S = 0.005
MAX_TOKENS = 64
SUBMIT_AGAIN_S = 0.05
UP_S, DOWN_S = (0.5, 1.5), (0.0, 0.6)
"""Ranges in seconds: how long Redis runs before a restart, and how long it is down during a restart."""
CALM_S = (0.05, 0.3)
"""Range of the seconds between two cuts."""


@dataclass(eq=False)
class Load:
    """Submits and reads jobs until `is_over` is true, even while the connection fails."""

    client: AsyncClient
    checker: Checker
    rng: random.Random
    is_over: bool = False
    n_refused: int = 0
    """Number of submits that were not acknowledged."""

    async def run(self) -> None:
        await run_jobs(self._one_job, width=WIDTH, wants_more=lambda *_: not self.is_over)

    async def _one_job(self) -> None:
        shape = replace(draw_job(self.rng, max_tokens=MAX_TOKENS), n_readers=1)
        try:
            job = await submit(self.client, self.checker, shape)
        except (RedisError, OSError):
            self.n_refused += 1
            await asyncio.sleep(SUBMIT_AGAIN_S)
        else:
            await read(job, self.checker, "reader")


@asynccontextmanager
async def loaded(environment: Environment, checker: Checker, rng: random.Random, url: str) -> AsyncIterator[Load]:
    """Start workers, and run a load until the context ends. Workers and load connect to Redis at `url`."""
    environment.use_random_model()
    await environment.start_ready(N_WORKERS, {"tick_s": TICK_S}, redis_url=url)
    async with environment.client(url) as client, environment.client() as undisturbed:
        load = Load(client, checker, rng)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            yield load
            load.is_over = True
        await collect(undisturbed, checker)


async def restarts(seed: int, report: ProgressReport, *, n_restarts: int = 20) -> Outcome:
    """Kill and restart Redis under load. Redis syncs every write to disk before it acknowledges it."""
    checker, rng, started_s = Checker(), seeded_random(seed, "restarts"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lq-soak-") as folder:
        server = Server(Path(folder), reserve_port(), DURABLE)
        server.start()
        try:
            url = f"redis://127.0.0.1:{server.port}/0"
            async with (
                Environment(redis_url=url, settings={"lease_s": 2.0}) as environment,
                loaded(environment, checker, seeded_random(seed, "jobs"), url) as load,
            ):
                for number in range(n_restarts):
                    await asyncio.sleep(rng.uniform(*UP_S))
                    server.kill()
                    await asyncio.sleep(rng.uniform(*DOWN_S))
                    await asyncio.to_thread(server.start)
                    report(number + 1, n_restarts, f"restarts, {len(checker.accepted)} jobs")
        finally:
            server.kill()
    figures = {"restarts": n_restarts, "submits not acknowledged": load.n_refused}
    return Outcome("restarts", checker.judge(), figures, time.monotonic() - started_s)


async def cuts(seed: int, report: ProgressReport, *, n_cuts: int = 200) -> Outcome:
    """Reset all connections of workers and clients repeatedly."""
    checker, rng, started_s = Checker(), seeded_random(seed, "cuts"), time.monotonic()
    async with Environment(settings={"lease_s": 2.0}) as environment:
        with Proxy(environment.redis_url) as proxy:
            async with loaded(environment, checker, seeded_random(seed, "jobs"), proxy.url) as load:
                n_done = 0
                # Cuts before the first job would disturb nothing.
                await wait_until(lambda: bool(checker.accepted), "a job is accepted")
                while n_done < n_cuts:
                    await asyncio.sleep(rng.uniform(*CALM_S))
                    n_done += proxy.cut() > 0
                    report(n_done, n_cuts, f"cuts, {proxy.n_cut} connections")
    figures = {"cuts": n_cuts, "connections cut": proxy.n_cut, "submits not acknowledged": load.n_refused}
    return Outcome("cuts", checker.judge(), figures, time.monotonic() - started_s)
