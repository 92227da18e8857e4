"""A job stays with its living worker: other workers with shorter leases, and pauses of Redis, do not move it."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from pathlib import Path

from tests.soak.chaos import seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment, WorkerProcess
from tests.soak.report import Outcome, ProgressReport
from tests.soak.runners import TICK_S, Runners, long_jobs
from tests.support.ports import reserve_port
from tests.support.redis_servers import Server

LEASES_S = (6.0, 2.0)
"""The leases of the two workers. Neither may take a job of the other, as long as both live."""
N_JOBS = 8
CALM_S = (1.0, 3.0)
PAUSE_S = (1.0, 7.0)
"""Range of the seconds for which Redis stands still. Most pauses are longer than the shorter lease."""
AFTER_S = 3.0
"""Seconds after a pause in which a worker could take a job of the other."""


async def leases(seed: int, report: ProgressReport, *, n_pauses: int = 10) -> Outcome:
    """Stop Redis again and again, and count the jobs that changed to another worker. None may change."""
    checker, rng, started_s = Checker(), seeded_random(seed, "leases"), time.monotonic()
    n_seen = n_moved = 0
    with tempfile.TemporaryDirectory(prefix="lq-soak-") as folder:
        server = Server(Path(folder), reserve_port(), ("--save", ""))
        server.start()
        try:
            url = f"redis://127.0.0.1:{server.port}/0"
            async with (
                Environment(redis_url=url) as environment,
                long_jobs(environment, checker, rng, N_JOBS) as runners,
            ):
                workers = [
                    worker
                    for lease_s in LEASES_S
                    for worker in await environment.start_ready(1, {"tick_s": TICK_S}, lease_s=lease_s)
                ]
                for number in range(n_pauses):
                    await asyncio.sleep(rng.uniform(*CALM_S))
                    held = await _held(runners, workers)
                    server.signal(signal.SIGSTOP)
                    await asyncio.sleep(rng.uniform(*PAUSE_S))
                    server.signal(signal.SIGCONT)
                    await asyncio.sleep(AFTER_S)
                    moved = await runners.newer_attempts(held)
                    n_seen, n_moved = n_seen + len(held), n_moved + len(moved)
                    for job_id in moved:
                        checker.add_violation(f"{job_id}: moved to another attempt although its worker was alive")
                    report(number + 1, n_pauses, f"pauses of Redis, {n_moved} of {n_seen} jobs moved")
        finally:
            server.kill()
    figures = {"pauses": n_pauses, "leases, s": LEASES_S, "jobs moved": f"{n_moved} of {n_seen}"}
    return Outcome("leases", checker.judge(), figures, time.monotonic() - started_s)


async def _held(runners: Runners, workers: list[WorkerProcess]) -> dict[str, int]:
    """Return the attempt number of each job that runs on one of the workers."""
    held: dict[str, int] = {}
    for worker in workers:
        held |= await runners.attempts_of(worker)
    return held
