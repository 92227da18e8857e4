"""How many jobs a second pass through the queue when the engine computes nothing? Beside RQ and a plain Redis Stream.

Each system gets the same number of jobs while its worker does not take any. Then one worker process takes all of them:

- `llamaq`: a worker with all its parts, except that the engine computes nothing (`null_engine.py`). A job has a prompt
  of three tokens and one output token. `llamaq_bulk` is the same with jobs of the priority `bulk`.
- `rq`: the worker that `rq worker` starts, which forks a process for each job. `rq_simple`: RQ's `SimpleWorker`, which
  runs the jobs in its own process. A job calls a function that returns its argument.
- `stream`: XREADGROUP, XACK and XDEL of entries of the same size, in blocks of 32, without any state of a job.

`jobs_per_s` is the rate of the worker from its first claim on: a paused queue has the jobs, and the worker looks
every half second whether the pause has ended. `submits_per_s` is the rate of one client that submits one job after
the other, or, as `submits_per_s_many`, in calls with 100 jobs each. `cpu_us_per_job` is the processor time of the
worker and of Redis while the worker takes the jobs; other load on the machine changes it little. Systems take turns
in every round.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import redis
import rq

from cpu_clock import CpuClock, cpu_s
from harness import Figures, Plan, Stack, note, path_with_this_folder, run, show, start_stack
from job_timings import median_of
from llamaq.producer import AsyncClient, JobArguments
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from other_queues import GROUP, STREAM, time_worker
from systems import check_target

N_JOBS, QUICK_N_JOBS = 3000, 60
N_RQ_JOBS, QUICK_N_RQ_JOBS = 300, 10
"""RQ gets fewer jobs, because each of them takes longer."""
BLOCK = 100
"""Jobs in one call of `submit_many`."""
N_PARALLEL = 32
PROMPT = [1, 2, 3]
PAYLOAD = b"x" * 200
"""About the size of a request of llamaq."""
JOBS_TARGET = 3000
RQ_TARGET = 10


# ---- one round of each system


async def _time_llamaq(priority: str, n_jobs: int, clock: CpuClock, client: AsyncClient) -> Figures:
    await client.pause()
    options: JobArguments = {"tokens": PROMPT, "max_tokens": 1, "cache_prompt": False, "stream": False}
    options["priority"] = priority  # type: ignore[typeddict-item]
    started_s = time.perf_counter()
    for _ in range(n_jobs // 2):
        await client.submit(**options)
    one_by_one_s, started_s = time.perf_counter() - started_s, time.perf_counter()
    for first in range(0, n_jobs // 2, BLOCK):
        jobs = await client.submit_many([options] * min(BLOCK, n_jobs // 2 - first))
    many_s = time.perf_counter() - started_s
    await client.resume()
    while (await client.queue_depth()).waiting == n_jobs:  # noqa: ASYNC110 - the worker notices the end of the pause later
        await asyncio.sleep(0.001)
    started_s, before = time.perf_counter(), clock.read()
    await jobs[-1].result(timeout=300)
    while (depth := await client.queue_depth()).waiting or depth.running:  # noqa: ASYNC110 - Redis is asked
        await asyncio.sleep(0.002)
    seconds = time.perf_counter() - started_s
    rates = (n_jobs // 2 / one_by_one_s, n_jobs // 2 / many_s)
    return {
        "jobs_per_s": round(n_jobs / seconds, 1),
        "submits_per_s": round(rates[0], 1),
        "submits_per_s_many": round(rates[1], 1),
        "cpu_us_per_job": {name: used for name, used in clock.us_per_token(before, n_jobs).items() if name != "client"},
    }


def _time_rq(kind: str, n_jobs: int, server: EmbeddedRedis) -> Figures:
    queue = rq.Queue(connection=redis.Redis.from_url(server.url))
    started_s = time.perf_counter()
    for number in range(n_jobs):
        queue.enqueue("other_queues.echo", number)
    return {"submits_per_s": round(n_jobs / (time.perf_counter() - started_s), 1)} | _time_worker(kind, n_jobs, server)


def _time_stream(n_jobs: int, server: EmbeddedRedis) -> Figures:
    client = redis.Redis.from_url(server.url)
    client.delete(STREAM)
    client.xgroup_create(STREAM, GROUP, mkstream=True)
    started_s = time.perf_counter()
    for _ in range(n_jobs):
        client.xadd(STREAM, {"request": PAYLOAD})
    submits = {"submits_per_s": round(n_jobs / (time.perf_counter() - started_s), 1)}
    return submits | _time_worker("stream", n_jobs, server)


def _time_worker(kind: str, n_jobs: int, server: EmbeddedRedis) -> Figures:
    """Return the figures of a worker that takes all jobs of another system."""
    before_s = cpu_s(server.pid or 0)
    seconds, used_s = time_worker(kind, server.url, n_jobs)
    used = {"worker": used_s, "redis": cpu_s(server.pid or 0) - before_s}
    cpu = {name: round(one * 1e6 / n_jobs, 1) for name, one in used.items()}
    return {"jobs_per_s": round(n_jobs / seconds, 1), "cpu_us_per_job": cpu}


def _systems(stack: Stack, n_jobs: int, n_rq_jobs: int) -> dict[str, Callable[[], Figures]]:
    clock = CpuClock(stack)
    return {
        "llamaq": lambda: stack.run(partial(_time_llamaq, "interactive", n_jobs, clock)),
        "llamaq_bulk": lambda: stack.run(partial(_time_llamaq, "bulk", n_jobs, clock)),
        "rq": partial(_time_rq, "rq", n_rq_jobs, stack.redis),
        "rq_simple": partial(_time_rq, "rq_simple", n_rq_jobs, stack.redis),
        "stream": partial(_time_stream, n_jobs, stack.redis),
    }


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by system."""
    n_jobs, n_rq_jobs = (QUICK_N_JOBS, QUICK_N_RQ_JOBS) if plan.quick else (N_JOBS, N_RQ_JOBS)
    with ExitStack() as exits:
        os.environ["PYTHONPATH"] = path_with_this_folder()
        settings = plan.settings(n_parallel=N_PARALLEL, batch_strategy="null_engine:DecodeMaximal")
        stack = exits.enter_context(start_stack([settings]))
        for warm_up in () if plan.quick else _systems(stack, BLOCK, QUICK_N_RQ_JOBS).values():
            warm_up()
        systems = _systems(stack, n_jobs, n_rq_jobs)
        names, rounds = list(systems), []
        for index in range(plan.rounds):
            first = index % len(names)
            figures = {name: systems[name]() for name in names[first:] + names[:first]}
            for one in figures.values():
                one["vs_rq"] = round(one["jobs_per_s"] / figures["rq"]["jobs_per_s"], 2)
            rounds.append({name: figures[name] for name in names})
            note("jobs/s: " + ", ".join(f"{name} {figures[name]['jobs_per_s']}" for name in names))
    results = median_of(rounds)
    _show(results)
    targets = {
        "jobs_per_s": check_target(results["llamaq"]["jobs_per_s"], at_least=JOBS_TARGET),
        "vs_rq": check_target(results["llamaq"]["vs_rq"], at_least=RQ_TARGET),
    }
    return {"jobs": n_jobs, "slots": N_PARALLEL, "systems": results, "targets": targets}


def _show(results: dict[str, Any]) -> None:
    rows = [
        (
            name,
            one["jobs_per_s"],
            f"{one['vs_rq']:.1f}",
            *one["cpu_us_per_job"].values(),
            one["submits_per_s"],
            one.get("submits_per_s_many", "-"),
        )
        for name, one in results.items()
    ]
    columns = ("system", "jobs/s", "vs rq", "worker us of CPU a job", "Redis us", "submits/s", "in blocks of 100")
    show("jobs a second", columns, rows)


if __name__ == "__main__":
    run(measure)
