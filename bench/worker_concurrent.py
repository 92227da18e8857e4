"""1, 4, 8, 16 and 32 jobs at once on one worker, as their subscribers see them, beside the bare loop.

64 random tokens in, 128 out past any end token, streaming, greedy and sampled. The worker has 32 slots throughout, the
bare loop as many sequences. In every round each number of jobs runs on all sides, one after the other. `vs_bare` is
tokens per second over the bare loop's of the same round; the bare loop is greedy and has no sampler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bare_loop import BareLoop
from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, stack
from job_timings import median_of, summarize
from llamaq.common.protocol.job_request import JobOptions
from workload import Prompts, follow_all, greedy, sampled

N_PARALLEL = 32
NUMBERS, QUICK_NUMBERS = (1, 4, 8, 16, 32), (1, 4)
N_IN, N_OUT, QUICK_N_OUT = 64, 128, 16
SIDES = {"greedy": greedy, "sampled": sampled}


def time_worker(over: Stack, prompts: list[list[int]], options: JobOptions) -> dict[str, Any]:
    """Figures of these prompts as jobs."""
    clock = CpuClock(over)
    before = clock.read()
    figures = summarize(over.run(partial(follow_all, prompts, options)))
    return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["tokens"])}


def time_all(over: Stack, bare: BareLoop, prompts: Prompts, number: int, n_out: int) -> dict[str, Any]:
    """One round of one number of jobs: the bare loop, then the worker, greedy and sampled."""
    figures: dict[str, Any] = {"bare": bare.run(prompts.several(number, N_IN), n_out).summary()}
    for side, options in SIDES.items():
        one = time_worker(over, prompts.several(number, N_IN), options(n_out))
        figures[side] = one | {"vs_bare": one["tokens_per_s"] / figures["bare"]["tokens_per_s"]}
    note(f"{number} at once, tokens/s: " + ", ".join(f"{side} {one['tokens_per_s']}" for side, one in figures.items()))
    return figures


def measure(plan: Plan) -> Figures:
    """The figures of all numbers of jobs."""
    settings = plan.settings(n_parallel=N_PARALLEL)
    numbers, n_out = (QUICK_NUMBERS, QUICK_N_OUT) if plan.quick else (NUMBERS, N_OUT)
    with BareLoop(settings) as bare, stack([settings]) as over:
        prompts = Prompts(plan.seed, bare.n_vocab)
        time_all(over, bare, prompts, max(numbers), 8)  # warm up
        rounds: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
        for _ in range(plan.rounds):
            for number in numbers:
                rounds[number].append(time_all(over, bare, prompts, number, n_out))
    jobs = {str(number): median_of(figures) for number, figures in rounds.items()}
    _show(jobs)
    return {"slots": N_PARALLEL, "tokens_in": N_IN, "tokens_out": n_out, "jobs": jobs}


def _show(jobs: dict[str, Any]) -> None:
    columns = ("jobs", "bare tok/s", "tok/s", "of bare", "TTFT p50", "p95", "ITL p50", "p95 ms")
    for side in SIDES:
        rows = []
        for number, figures in jobs.items():
            one, ttft, itl = figures[side], figures[side]["ttft_ms"], figures[side]["itl_ms"]
            rates = (figures["bare"]["tokens_per_s"], one["tokens_per_s"], f"{one['vs_bare']:.0%}")
            rows.append((number, *rates, ttft["p50"], ttft["p95"], itl["p50"], itl["p95"]))
        show(f"worker, {side}", columns, rows)


if __name__ == "__main__":
    run(measure)
