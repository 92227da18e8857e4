"""How much memory does a worker need beside its llama.cpp context, and does it grow over 100,000 jobs?

`bare_mb` is the memory of a process that has only the model and a context of the same settings. The worker computes
small jobs of several kinds: greedy and sampled, with log probabilities, with stop strings, and with JSON schemas.
`resident_mb` is its memory after each tenth of the jobs. After the second tenth all caches are full, and `grown_mb` is
the growth from there to the end. The host memory of the prefix cache (16 MiB here) is part of the worker's memory.
`child_mb` is the memory of the process that tries grammars.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bare_loop import context_options
from harness import ROOT, Figures, Plan, Stack, note, run, show, start_stack
from llamaq.producer import AsyncClient
from llamaq.worker.settings import WorkerSettings
from process_memory import peak_kb, resident_kb
from systems import check_target

N_JOBS, QUICK_N_JOBS = 100_000, 60
N_STEPS = 10
WINDOW = 256
CACHE_RAM_MB = 16
RESULT_TTL_S = 60.0
PROMPT_TOKENS, MAX_TOKENS = 48, 4
MOST_OVER_BARE_MB = 150
MOST_GROWN_MB = 5


class Jobs:
    """Source of small jobs of several kinds. Equal seeds give equal jobs."""

    def __init__(self, seed: int, n_vocab: int) -> None:
        self._random = random.Random(seed)
        self._n_vocab = n_vocab

    def job(self, index: int) -> dict[str, Any]:
        """Return the arguments of `submit` for one job."""
        draw = self._random
        job: dict[str, Any] = {
            "tokens": [draw.randrange(8, self._n_vocab) for _ in range(draw.randint(1, PROMPT_TOKENS))],
            "max_tokens": draw.randint(1, MAX_TOKENS),
        }
        match index % 10:
            case 0:
                job["json_schema"] = self._schema(index)
            case 1:
                job["logprobs"] = 3
            case 2:
                job |= {"stop": [f"stop {index}"], "temperature": 1.5, "frequency_penalty": 0.5}
            case 3:
                job |= {"dry_multiplier": 0.8, "mirostat": 2}
            case 4 | 5 | 6:
                job["temperature"] = 0.0
        return job

    def _schema(self, index: int) -> dict[str, Any]:
        name = f"field_{index if index % 100 == 0 else index % 10}"
        return {"type": "object", "properties": {name: {"type": "string", "maxLength": 9}}, "required": [name]}


async def run_jobs(stack: Stack, plan: Plan, n_jobs: int) -> list[Figures]:
    """Run the jobs, and return the memory of the worker before them and after each tenth of them."""
    started_s, n_done = time.perf_counter(), 0
    steps = [_memory(stack, 0, started_s)]
    async with AsyncClient(stack.redis.url, result_ttl_s=RESULT_TTL_S) as client:
        jobs = Jobs(plan.seed, stack.worker.card.n_vocab)
        async for _ in client.map(map(jobs.job, range(n_jobs)), ordered=False, window=WINDOW):
            n_done += 1
            if n_done % (n_jobs // N_STEPS) == 0:
                steps.append(_memory(stack, n_done, started_s))
                note(f"{n_done:,} jobs: {steps[-1]}")
    return steps


def _memory(stack: Stack, n_jobs: int, started_s: float) -> Figures:
    pid = stack.worker.card.pid
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children_of(task)]
    return {
        "jobs": n_jobs,
        "resident_mb": round(resident_kb(pid) / 1024, 1),
        "child_mb": round(sum(map(resident_kb, children)) / 1024, 1),
        "wall_s": round(time.perf_counter() - started_s, 1),
    }


def _children_of(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # the thread has ended meanwhile
        return []


def bare_context_mb(settings: WorkerSettings) -> float:
    """Return the memory of a process that has only the model and a context with the settings of the worker."""
    described = {
        "model": str(settings.model),
        "n_gpu_layers": settings.n_gpu_layers,
        "context": context_options(settings),
    }
    command = [sys.executable, str(ROOT / "bench" / "bare_context.py"), json.dumps(described)]
    return round(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024, 1)


def measure(plan: Plan) -> Figures:
    """Return the memory of the bare context and of the worker, and its growth."""
    n_jobs = QUICK_N_JOBS if plan.quick else N_JOBS
    settings = plan.settings(cache_ram_mb=CACHE_RAM_MB)
    bare_mb = bare_context_mb(settings)
    with start_stack([settings]) as stack:
        steps = asyncio.run(run_jobs(stack, plan, n_jobs))
        largest_mb = round(peak_kb(stack.worker.card.pid) / 1024, 1)
    rows = [(f"{one['jobs']:,}", *list(one.values())[1:], one["resident_mb"] - bare_mb) for one in steps]
    show("memory of a worker", ("jobs", "MB", "grammar process MB", "wall s", "over the bare context MB"), rows)
    grown_mb = round(steps[-1]["resident_mb"] - steps[2]["resident_mb"], 1)
    over_bare_mb = round(max(one["resident_mb"] for one in steps) - bare_mb, 1)
    return {
        "jobs": n_jobs,
        "bare_mb": bare_mb,
        "steps": steps,
        "largest_mb": largest_mb,
        "targets": {
            "over_bare_mb": check_target(over_bare_mb, at_most=MOST_OVER_BARE_MB),
            "grown_mb": check_target(grown_mb, at_most=MOST_GROWN_MB),
        },
    }


if __name__ == "__main__":
    run(measure)
