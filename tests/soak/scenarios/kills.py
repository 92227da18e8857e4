"""Workers die by SIGKILL in every phase of a job, and other workers continue it: no token is lost or repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.soak.chaos import JobShape, KillPlan, draw_job, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.load import WIRE, collect, record_published, run_job, run_jobs, run_with_background
from tests.soak.report import Outcome, ProgressReport
from tests.soak.worker_pool import WorkerPool

from llamaq.tools.demo_model.fact_questions import INLINE_FRAMES, Probe, recall_probe

SETTINGS: dict[str, Any] = {
    "lease_s": 1.0,
    "n_parallel": 4,
    "n_ctx": 4096,
    "chunk_size": 32,
    "speculation": "ngram",
    "max_crashes": 1000,  # the soak kills the workers, so no job may become a dead letter
}
TWO_TOKENS = {300: 100.0, 301: 100.0}
"""The bias of the only tokens of a job."""
WIDTH, MIN_OPEN_JOBS = 40, 12
"""Largest and smallest number of open jobs while kills remain."""
DISTANCE_WORDS = 90
ANSWER_TOKENS = 16
TICK_S = 0.01
"""Minimum time of a tick of the demo model, so that kills happen while answers are generated."""


async def kills(
    seed: int, report: ProgressReport, *, n_kills: int = 200, n_jobs: int = 5000, n_workers: int = 3
) -> Outcome:
    """Run small random jobs, and kill workers equally often in each phase and from outside."""
    rng, checker, started_s = seeded_random(seed, "jobs"), Checker(), time.monotonic()
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        plan = KillPlan(seeded_random(seed, "kills"), n_kills)
        await _under_kills(environment, plan, checker, lambda: draw_shape(rng), n_jobs, n_workers, report)
    return Outcome("kills", checker.judge(), figures_of(plan, checker, started_s), time.monotonic() - started_s)


async def recall(
    seed: int,
    report: ProgressReport,
    *,
    n_kills: int = 40,
    n_jobs: int = 400,
    n_workers: int = 3,
    n_probes: int = 40,
) -> Outcome:
    """Ask the demo model questions during kills. The answers must equal those of an undisturbed run."""
    rng, checker, started_s = seeded_random(seed, "recall"), Checker(), time.monotonic()
    probes = [recall_probe(rng.getrandbits(32), DISTANCE_WORDS, INLINE_FRAMES[1]) for _ in range(n_probes)]
    async with Environment(settings=SETTINGS) as environment:
        undisturbed = await _undisturbed(environment, probes)
        plan = KillPlan(seeded_random(seed, "kills"), n_kills)
        shapes = [replace(shape_of(probe), demands={"text": undisturbed[probe.prompt]}) for probe in probes]
        await _under_kills(
            environment, plan, checker, lambda: rng.choice(shapes), n_jobs, n_workers, report, tick_s=TICK_S
        )
    right = sum(undisturbed[probe.prompt] == probe.answer for probe in probes)
    figures = figures_of(plan, checker, started_s) | {"right answers undisturbed": f"{right} of {len(probes)}"}
    return Outcome("recall", checker.judge(), figures, time.monotonic() - started_s)


def draw_shape(rng: Random) -> JobShape:
    """Return a random job. Half of the jobs write only two tokens, so that their texts repeat and are drafted."""
    shape = draw_job(rng)
    return replace(shape, options={**shape.options, "logit_bias": TWO_TOKENS}) if rng.random() < 0.5 else shape


def shape_of(probe: Probe) -> JobShape:
    """Return a job that asks the question of a probe."""
    return JobShape({"prompt": probe.prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "stop": ["\n"]})


async def _undisturbed(environment: Environment, probes: list[Probe]) -> dict[str, str]:
    """Return the answers of an undisturbed worker, by prompt."""
    (worker,) = await environment.start_ready()
    async with environment.client() as client:
        results = [await client.generate(**{"timeout": 60, **shape_of(probe).options}) for probe in probes]
    worker.close()
    return {probe.prompt: result.text for probe, result in zip(probes, results, strict=True)}


async def _under_kills(
    environment: Environment,
    plan: KillPlan,
    checker: Checker,
    draw: Callable[[], JobShape],
    n_jobs: int,
    n_workers: int,
    report: ProgressReport,
    *,
    tick_s: float = 0.0,
) -> None:
    """Run jobs until all planned kills are done and at least `n_jobs` jobs have ended."""
    n_ended, n_kills = 0, max(1, plan.n_kills)

    def wants_more(n_begun: int, n_open: int) -> bool:
        if plan.is_done:
            return n_begun < n_jobs
        return n_open < MIN_OPEN_JOBS or n_begun < 2 * WIDTH + n_jobs * plan.n_done / n_kills

    async def one_job() -> None:
        nonlocal n_ended
        await run_job(client, checker, draw())
        n_ended += 1
        report(plan.n_done, plan.n_kills, f"kills, {n_ended} jobs")

    pool = WorkerPool(environment, plan, n_workers, pace=lambda: n_ended / n_jobs, tick_s=tick_s)
    async with environment.client() as client, record_published(client, checker):
        await run_with_background(pool.run(), run_jobs(one_job, width=WIDTH, wants_more=wants_more))
        await collect(client, checker)
    if not plan.is_done:
        checker.add_violation(f"planned kills that did not happen: {+plan.left}")


def figures_of(plan: KillPlan, checker: Checker, started_s: float) -> dict[str, Any]:
    """Return the number of kills by point, and the cost of the kills."""
    events = [checker.events_of(job_id, WIRE) for job_id in checker.accepted]
    attempts = [sum(event.type == "started" for event in of_job) for of_job in events]
    return {
        "kills": plan.done.total(),
        "kills by phase": dict(sorted(plan.done.items())),
        "kills by point": dict(sorted(plan.points.items())),
        "jobs with more than one attempt": sum(number > 1 for number in attempts),
        "most attempts of a job": max(attempts, default=0),
        "jobs per s": round(len(attempts) / (time.monotonic() - started_s), 1),
    }
