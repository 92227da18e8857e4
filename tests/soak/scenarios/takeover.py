"""How long a stream pauses when its worker dies, and that late writes of a stopped worker are refused."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import Any

from tests.soak.chaos import dice
from tests.soak.checker import Checker
from tests.soak.environment import Environment, WorkerProcess, until
from tests.soak.report import Outcome, ProgressReport, percentiles
from tests.soak.runners import TICK_S, Runners, long_jobs

N_WORKERS = 3
JOBS_A_WORKER = 4
TARGET_S = 2.0
"""The next attempt may start this many seconds after the lease has expired."""
PATIENCE_S = 20.0
LOST = re.compile(r"job\.lost id=(\S+) attempt=(\d+)")


async def takeover(seed: int, report: ProgressReport, *, n_kills: int = 30, lease_s: float = 3.0) -> Outcome:
    """Measure the time from the kill of a worker to the next attempt of each of its jobs."""
    checker, rng, started_s = Checker(), dice(seed, "takeover"), time.monotonic()
    waits_s: list[float] = []
    async with (
        Environment(settings={"lease_s": lease_s}) as environment,
        long_jobs(environment, checker, rng, N_WORKERS * JOBS_A_WORKER) as runners,
    ):
        await environment.start_ready(N_WORKERS, {"tick_s": TICK_S})
        for number in range(n_kills):
            waits_s += await _kill_one(runners, lease_s)
            await environment.start_ready(1, {"tick_s": TICK_S})
            report(number + 1, n_kills, f"kills, {len(waits_s)} jobs taken over")
    found = percentiles(waits_s)
    if not waits_s or found["p99"] > lease_s + TARGET_S:
        checker.complain(f"takeover p99 is not within lease + {TARGET_S:g} s: {found}")
    figures = {"kills": n_kills, "lease_s": lease_s, "from kill to next attempt, s": found}
    return Outcome("takeover", checker.judge(), figures, time.monotonic() - started_s)


async def _kill_one(runners: Runners, lease_s: float) -> list[float]:
    """Kill a worker; returns how long each of its jobs waited."""
    worker = await runners.busiest()
    await asyncio.sleep(runners.rng.uniform(0, lease_s))  # at any time between two renewals
    killed_s = time.time()
    worker.kill()
    held = await runners.held_by(worker)
    for job_id in await runners.await_next(held, lease_s + PATIENCE_S):
        runners.checker.complain(f"{job_id}: not taken over within {lease_s + PATIENCE_S:g} s")
    starts = [await runners.started_s(job_id, attempt) for job_id, attempt in held.items()]
    return [at_s - killed_s for at_s in starts if at_s is not None]


async def stopped(seed: int, report: ProgressReport, *, n_stops: int = 12, lease_s: float = 1.0) -> Outcome:
    """Workers are stopped until others have their jobs, and then continue: everything that they write is refused."""
    checker, rng, started_s = Checker(), dice(seed, "stopped"), time.monotonic()
    n_held = n_refused = 0
    async with (
        Environment(settings={"lease_s": lease_s}) as environment,
        long_jobs(environment, checker, rng, N_WORKERS * JOBS_A_WORKER) as runners,
    ):
        await environment.start_ready(N_WORKERS, {"tick_s": TICK_S})
        for number in range(n_stops):
            worker = await runners.busiest()
            held = await _stop_and_go_on(runners, worker, lease_s)
            n_held += len(held)
            n_refused += await _refusals(runners, worker, held)
            report(number + 1, n_stops, f"stops, {n_refused} of {n_held} attempts refused")
    figures: dict[str, Any] = {"stops": n_stops, "lease_s": lease_s, "attempts refused": f"{n_refused} of {n_held}"}
    if not n_held:
        checker.complain("no worker held a job when it was stopped")
    return Outcome("stopped", checker.judge(), figures, time.monotonic() - started_s)


async def _stop_and_go_on(runners: Runners, worker: WorkerProcess, lease_s: float) -> dict[str, int]:
    """Returns the attempts that the worker held while it was stopped and that others have replaced."""
    worker.signal(signal.SIGSTOP)
    held = await runners.held_by(worker)
    try:
        late = await runners.await_next(held, lease_s + PATIENCE_S)
    finally:
        worker.signal(signal.SIGCONT)
    for job_id in late:
        runners.checker.complain(f"{job_id}: not taken over within {lease_s + PATIENCE_S:g} s")
    return {job_id: attempt for job_id, attempt in held.items() if job_id not in late}


async def _refusals(runners: Runners, worker: WorkerProcess, held: dict[str, int]) -> int:
    """Count the attempts whose late write was refused."""

    def progress_line() -> set[tuple[str, int]]:
        return {(job_id, int(attempt)) for job_id, attempt in LOST.findall(worker.log)} & set(held.items())

    try:
        await until(lambda: len(progress_line()) == len(held), "every late write refused", PATIENCE_S)
    except TimeoutError:
        for job_id, attempt in set(held.items()) - progress_line():
            runners.checker.complain(f"{job_id}: attempt {attempt} was not refused after SIGCONT")
    return len(progress_line())
