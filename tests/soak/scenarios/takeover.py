"""Measures how long a stream pauses when its worker dies. Checks that late writes of a paused worker are refused."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import Any

from tests.soak.chaos import seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment, WorkerProcess, wait_until
from tests.soak.report import Outcome, ProgressReport, percentiles
from tests.soak.runners import TICK_S, Runners, long_jobs

N_WORKERS = 3
JOBS_A_WORKER = 4
TARGET_S = 2.0
"""Longest allowed time from the end of the lease to the next attempt, for 99 % of the jobs."""
TIMEOUT_S = 20.0
LOST = re.compile(r"job\.lost id=(\S+) attempt=(\d+)")


async def takeover(
    seed: int, report: ProgressReport, *, n_kills: int = 30, lease_s: float = 3.0, target_s: float = TARGET_S
) -> Outcome:
    """Kill workers, and measure the time from each kill to the next attempt of each of the worker's jobs."""
    checker, rng, started_s = Checker(), seeded_random(seed, "takeover"), time.monotonic()
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
    if not waits_s or found["p99"] > lease_s + target_s:
        checker.add_violation(f"takeover p99 is not within lease + {target_s:g} s: {found}")
    figures = {"kills": n_kills, "lease_s": lease_s, "from kill to next attempt, s": found}
    return Outcome("takeover", checker.judge(), figures, time.monotonic() - started_s)


async def _kill_one(runners: Runners, lease_s: float) -> list[float]:
    """Kill a worker, and return the seconds until the next attempt of each of its jobs."""
    worker = await runners.busiest()
    await asyncio.sleep(runners.rng.uniform(0, lease_s))  # a random moment between two renewals of the lease
    killed_s = time.time()
    worker.kill()
    attempts = await runners.attempts_of(worker)
    for job_id in await runners.await_next_attempts(attempts, lease_s + TIMEOUT_S):
        runners.checker.add_violation(f"{job_id}: not taken over within {lease_s + TIMEOUT_S:g} s")
    starts = [await runners.started_s(job_id, attempt) for job_id, attempt in attempts.items()]
    return [at_s - killed_s for at_s in starts if at_s is not None]


async def stopped(seed: int, report: ProgressReport, *, n_stops: int = 12, lease_s: float = 1.0) -> Outcome:
    """Pause workers (SIGSTOP) until other workers have their jobs. After SIGCONT, all their writes must be refused."""
    checker, rng, started_s = Checker(), seeded_random(seed, "stopped"), time.monotonic()
    n_attempts = n_refused = 0
    async with (
        Environment(settings={"lease_s": lease_s}) as environment,
        long_jobs(environment, checker, rng, N_WORKERS * JOBS_A_WORKER) as runners,
    ):
        await environment.start_ready(N_WORKERS, {"tick_s": TICK_S})
        for number in range(n_stops):
            worker = await runners.busiest()
            attempts = await _stop_and_continue(runners, worker, lease_s)
            n_attempts += len(attempts)
            n_refused += await _refusals(runners, worker, attempts)
            report(number + 1, n_stops, f"stops, {n_refused} of {n_attempts} attempts refused")
    figures: dict[str, Any] = {"stops": n_stops, "lease_s": lease_s, "attempts refused": f"{n_refused} of {n_attempts}"}
    if not n_attempts:
        checker.add_violation("no worker ran a job when it was stopped")
    return Outcome("stopped", checker.judge(), figures, time.monotonic() - started_s)


async def _stop_and_continue(runners: Runners, worker: WorkerProcess, lease_s: float) -> dict[str, int]:
    """Pause a worker until other workers run its jobs. Returns its attempts that were replaced, by job id."""
    worker.signal(signal.SIGSTOP)
    attempts = await runners.attempts_of(worker)
    try:
        late = await runners.await_next_attempts(attempts, lease_s + TIMEOUT_S)
    finally:
        worker.signal(signal.SIGCONT)
    for job_id in late:
        runners.checker.add_violation(f"{job_id}: not taken over within {lease_s + TIMEOUT_S:g} s")
    return {job_id: attempt for job_id, attempt in attempts.items() if job_id not in late}


async def _refusals(runners: Runners, worker: WorkerProcess, attempts: dict[str, int]) -> int:
    """Return the number of attempts whose late write was refused."""

    def refused_attempts() -> set[tuple[str, int]]:
        return {(job_id, int(attempt)) for job_id, attempt in LOST.findall(worker.log)} & set(attempts.items())

    try:
        await wait_until(lambda: len(refused_attempts()) == len(attempts), "every late write refused", TIMEOUT_S)
    except TimeoutError:
        for job_id, attempt in set(attempts.items()) - refused_attempts():
            runners.checker.add_violation(f"{job_id}: attempt {attempt} was not refused after SIGCONT")
    return len(refused_attempts())
