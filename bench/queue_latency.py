"""How long does a job wait for the worker, and a token for its subscriber, when a slot is free?

Single jobs run on an idle worker, one after the other. The engine computes nothing (`null_engine.py`), or is that of
`--model`. All times are from one clock.

- `submit_to_admitted_ms`: from the call of `submit` to the moment at which the scheduler gives the job a slot, which
  is just before its first tick.
- `token_to_subscriber_ms`: from the end of the tick that generated a token to its arrival in `job.stream()`.

Targets, with the engine that computes nothing: submit to admitted at most 1.5 ms (p50) and 5 ms (p99).
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import Figures, Plan, Stack, note, path_with_this_folder, run, show, start_stack
from job_timings import Timeline, median_of, spread
from llamaq.producer import AsyncClient
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.engine.engine import Engine
from systems import check_target
from workload import Prompts, follow, greedy

TIMES_FILE = "BENCH_TIMES_FILE"
"""Environment variable: the file to which the hook of a worker writes its times."""
N_JOBS, QUICK_N_JOBS = 300, 10
N_IN, N_OUT = 16, 12
N_PARALLEL = 4
PAUSE_S = 0.01
READ_TIMEOUT_S = 10.0
"""Between two jobs: the worker is idle again then."""
NULL, MODEL = "null", "model"
"""Names of the engines, and of their queues."""
P50_TARGET_MS, P99_TARGET_MS = 1.5, 5.0

_ticks_s: list[float] = []
"""Ends of the ticks since the last job, in seconds since the epoch. In the process of the worker."""

EngineRun = Callable[[Engine, Batch], list[SlotResult]]


def _note_ends(run_engine: EngineRun) -> EngineRun:
    """Return an `Engine.run` that notes when each tick has ended."""

    def noted(engine: Engine, batch: Batch) -> list[SlotResult]:
        results = run_engine(engine, batch)
        _ticks_s.append(time.time())
        return results

    return noted


def record(name: str, measurements: Mapping[str, Any]) -> None:
    """Write the times of a job that has ended. This hook runs in the process of the worker."""
    if name == "request.done":
        line = {"job_id": measurements["job_id"], "slot_at": measurements["slot_at"], "ticks_s": list(_ticks_s)}
        _ticks_s.clear()
        with Path(os.environ[TIMES_FILE]).open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "queue_latency":  # imported by a worker
    Engine.run = _note_ends(Engine.run)  # type: ignore[method-assign, assignment]


async def run_jobs(prompts: list[list[int]], client: AsyncClient) -> list[Timeline]:
    """Run one job after the other. The times of the timelines are in seconds since the epoch."""
    timelines = []
    for prompt in prompts:
        await asyncio.sleep(PAUSE_S)
        epoch_s = time.time() - time.perf_counter()
        one = await follow(client, prompt, **greedy(N_OUT))
        arrivals_s = [arrival_s + epoch_s for arrival_s in one.arrivals_s]
        timelines.append(replace(one, submitted_s=one.submitted_s + epoch_s, arrivals_s=arrivals_s))
    return timelines


def summarize(timelines: Sequence[Timeline], times: Mapping[str, dict[str, Any]]) -> Figures:
    """Return the figures of jobs; `times` has what the worker noted about each of them."""
    waits_ms, ways_ms = [], []
    for one in timelines:
        noted = times[one.job_id or ""]
        waits_ms.append((noted["slot_at"] - one.submitted_s) * 1000)
        arrivals = [arrival_s for arrival_s, n in zip(one.arrivals_s, one.counts, strict=True) for _ in range(n)]
        ticks_s = noted["ticks_s"][-len(arrivals) :]
        ways_ms += [(arrival_s - tick_s) * 1000 for arrival_s, tick_s in zip(arrivals, ticks_s, strict=True)]
    return {"submit_to_admitted_ms": spread(waits_ms), "token_to_subscriber_ms": spread(ways_ms)}


def read_times(times_file: Path, n_jobs: int) -> dict[str, dict[str, Any]]:
    """Return what the worker noted, by job, and empty the file."""
    until_s = time.monotonic() + READ_TIMEOUT_S
    while len(lines := times_file.read_text().splitlines()) < n_jobs and time.monotonic() < until_s:
        time.sleep(0.01)
    times_file.write_text("")
    return {one["job_id"]: one for one in map(json.loads, lines)}


def measure_round(stack: Stack, prompts: Prompts, times_file: Path, n_jobs: int) -> Figures:
    """Return the figures of one round for both engines."""
    figures: dict[str, Figures] = {}
    for name in stack.workers:
        timelines = stack.run(partial(run_jobs, prompts.several(n_jobs, N_IN)), name)
        figures[name] = summarize(timelines, read_times(times_file, n_jobs + 1))  # one more job opens the connections
    admitted = figures[NULL]["submit_to_admitted_ms"]
    note(f"submit to admitted: p50 {admitted['p50']} ms, p99 {admitted['p99']} ms")
    return figures


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by engine."""
    n_jobs = QUICK_N_JOBS if plan.quick else N_JOBS
    with ExitStack() as exits:
        times_file = Path(exits.enter_context(tempfile.TemporaryDirectory())) / "times.jsonl"
        times_file.touch()
        os.environ |= {TIMES_FILE: str(times_file), "PYTHONPATH": path_with_this_folder()}
        strategies = {NULL: "null_engine:DecodeMaximal", **({} if plan.quick else {MODEL: "decode-maximal"})}
        hooks = ("queue_latency:record",)
        settings = [
            plan.settings(n_parallel=N_PARALLEL, queue=name, batch_strategy=strategy, hooks=hooks)
            for name, strategy in strategies.items()
        ]
        stack = exits.enter_context(start_stack(settings))
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        if not plan.quick:
            measure_round(stack, prompts, times_file, QUICK_N_JOBS)  # warm up
        engines = median_of([measure_round(stack, prompts, times_file, n_jobs) for _ in range(plan.rounds)])
    _show(engines)
    admitted = engines[NULL]["submit_to_admitted_ms"]
    targets = {
        "admitted_p50_ms": check_target(admitted["p50"], at_most=P50_TARGET_MS),
        "admitted_p99_ms": check_target(admitted["p99"], at_most=P99_TARGET_MS),
    }
    return {"jobs": n_jobs, "tokens_out": N_OUT, "engines": engines, "targets": targets}


def _show(engines: dict[str, Any]) -> None:
    rows = [(f"{name}: {figure}", *one[figure].values()) for name, one in engines.items() for figure in one]
    show("ms", ("", "p50", "p95", "p99", "max"), rows)


if __name__ == "__main__":
    run(measure)
