"""1, 4, 8, 16 and 32 jobs at once on one worker, as their subscribers see them, compared with the bare loop.

A job has a prompt of 64 random tokens and 128 output tokens (end tokens are ignored). It is streamed, and either greedy
or sampled. The worker always has 32 slots, and the bare loop has 32 sequences. In every round each number of jobs runs
on the bare loop and on the worker, one after the other. `vs_bare` is the worker's tokens per second divided by the bare
loop's in the same round. The bare loop is greedy and has no sampler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bare_loop import BareLoop
from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_timings import median_of, summarize
from llamaq.common.protocol.job_request import JobOptions
from workload import Prompts, follow_all, greedy, sampled

N_PARALLEL = 32
NUMBERS, QUICK_NUMBERS = (1, 4, 8, 16, 32), (1, 4)
N_IN, N_OUT, QUICK_N_OUT = 64, 128, 16
SAMPLING = {"greedy": greedy, "sampled": sampled}


def time_worker(stack: Stack, prompts: list[list[int]], options: JobOptions) -> dict[str, Any]:
    """Run these prompts as jobs at once and return the figures."""
    clock = CpuClock(stack)
    before = clock.read()
    figures = summarize(stack.run(partial(follow_all, prompts, options)))
    return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["tokens"])}


def time_all(stack: Stack, bare: BareLoop, prompts: Prompts, number: int, n_out: int) -> dict[str, Any]:
    """Run one round with `number` jobs: the bare loop, then the worker, greedy and sampled."""
    figures: dict[str, Any] = {"bare": bare.run(prompts.several(number, N_IN), n_out).summary()}
    for sampling, options in SAMPLING.items():
        one = time_worker(stack, prompts.several(number, N_IN), options(n_out))
        figures[sampling] = one | {"vs_bare": one["tokens_per_s"] / figures["bare"]["tokens_per_s"]}
    note(f"{number} at once, tokens/s: " + ", ".join(f"{name} {one['tokens_per_s']}" for name, one in figures.items()))
    return figures


def measure(plan: Plan) -> Figures:
    """Return the figures by number of jobs."""
    settings = plan.settings(n_parallel=N_PARALLEL)
    numbers, n_out = (QUICK_NUMBERS, QUICK_N_OUT) if plan.quick else (NUMBERS, N_OUT)
    with BareLoop(settings) as bare, start_stack([settings]) as stack:
        prompts = Prompts(plan.seed, bare.n_vocab)
        time_all(stack, bare, prompts, max(numbers), 8)  # warm up
        rounds: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
        for _ in range(plan.rounds):
            for number in numbers:
                rounds[number].append(time_all(stack, bare, prompts, number, n_out))
    jobs = {str(number): median_of(figures) for number, figures in rounds.items()}
    _show(jobs)
    return {"slots": N_PARALLEL, "tokens_in": N_IN, "tokens_out": n_out, "jobs": jobs}


def _show(jobs: dict[str, Any]) -> None:
    columns = ("jobs", "bare tok/s", "tok/s", "of bare", "TTFT p50", "p95", "ITL p50", "p95 ms")
    for sampling in SAMPLING:
        rows = []
        for number, figures in jobs.items():
            one, ttft, itl = figures[sampling], figures[sampling]["ttft_ms"], figures[sampling]["itl_ms"]
            rates = (figures["bare"]["tokens_per_s"], one["tokens_per_s"], f"{one['vs_bare']:.0%}")
            rows.append((number, *rates, ttft["p50"], ttft["p95"], itl["p50"], itl["p95"]))
        show(f"worker, {sampling}", columns, rows)


if __name__ == "__main__":
    run(measure)
