"""One job at a time: the latency that a caller sees, compared with the bare loop with one sequence.

A job has a prompt of 64 random tokens and 128 output tokens, greedy; end tokens do not stop it. In every round the bare
loop, `stream` and `generate` run a few jobs each. `overhead_ms` is the latency of a streamed job minus the time of the
bare loop. The difference is the cost of queue, Redis, text and events. `same_tokens` is the number of jobs with the
same tokens as the bare loop.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from bare_loop import BareLoop, BareRun
from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_timings import Timeline, median_of, spread, summarize
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient
from workload import Prompts, follow, greedy

N_IN, N_OUT, QUICK_N_OUT = 64, 128, 16
N_JOBS, QUICK_N_JOBS = 10, 2


async def stream_each(prompts: list[list[int]], options: JobOptions, client: AsyncClient) -> list[Timeline]:
    """Stream the jobs one after the other and return their timelines."""
    return [await follow(client, prompt, **options) for prompt in prompts]


async def generate_each(prompts: list[list[int]], options: JobOptions, client: AsyncClient) -> list[float]:
    """Run the jobs one after the other without streaming and return their latencies in milliseconds."""
    latencies = []
    for prompt in prompts:
        start_s = time.perf_counter()
        await client.generate_tokens(prompt, **options)
        latencies.append((time.perf_counter() - start_s) * 1000)
    return latencies


def time_round(stack: Stack, bare: BareLoop, prompts: list[list[int]], n_out: int) -> dict[str, Any]:
    """Run one round with the same prompts for the bare loop, `stream` and `generate`."""
    options = greedy(n_out)
    alone = [bare.run([prompt], n_out) for prompt in prompts]
    clock = CpuClock(stack)
    before = clock.read()
    streamed = stack.run(partial(stream_each, prompts, options))
    used = clock.us_per_token(before, n_out * len(prompts))
    generated_ms = stack.run(partial(generate_each, prompts, options))
    figures = _compare(alone, streamed) | {"generate_latency_ms": spread(generated_ms)}
    figures["stream"]["cpu_us_per_token"] = used
    note(f"tokens/s: bare {figures['bare']['tokens_per_s']}, stream {figures['stream']['tokens_per_s']}")
    return figures


def _compare(alone: list[BareRun], streamed: list[Timeline]) -> dict[str, Any]:
    bare = median_of([one.summary() for one in alone])
    bare["latency_ms"] = spread([one.wall_s * 1000 for one in alone])
    stream = summarize(streamed) | {"latency_ms": spread([one.latency_ms for one in streamed])}
    pairs = list(zip(alone, streamed, strict=True))
    return {
        "bare": bare,
        "stream": stream,
        "overhead_ms": spread([two.latency_ms - one.wall_s * 1000 for one, two in pairs]),
        "vs_bare": sum(one.wall_s for one in alone) / sum(one.latency_ms for one in streamed) * 1000,
        "same_tokens": sum(one.tokens[0] == two.tokens for one, two in pairs),
    }


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    settings = plan.settings()
    n_jobs, n_out = (QUICK_N_JOBS, QUICK_N_OUT) if plan.quick else (N_JOBS, N_OUT)
    with BareLoop(settings) as bare, start_stack([settings]) as stack:
        prompts = Prompts(plan.seed, bare.n_vocab)
        time_round(stack, bare, prompts.several(2, N_IN), 8)  # warm up
        rounds = [time_round(stack, bare, prompts.several(n_jobs, N_IN), n_out) for _ in range(plan.rounds)]
    figures = median_of(rounds)
    _show(figures)
    return {"tokens_in": N_IN, "tokens_out": n_out, "jobs": n_jobs, **figures}


def _show(figures: dict[str, Any]) -> None:
    bare, stream, generate = figures["bare"], figures["stream"], figures["generate_latency_ms"]

    def latency(figures: dict[str, Any]) -> tuple[float, float]:
        return figures["latency_ms"]["p50"], figures["latency_ms"]["p95"]

    rows = [
        ("bare loop", *latency(bare), bare["tokens_per_s"], bare["ttft_ms"], ""),
        ("stream", *latency(stream), stream["tokens_per_s"], stream["ttft_ms"]["p50"], f"{figures['vs_bare']:.0%}"),
        ("generate", generate["p50"], generate["p95"], "", "", ""),
    ]
    show("one job at a time", ("", "latency p50", "p95 ms", "tok/s", "TTFT ms", "of bare"), rows)


if __name__ == "__main__":
    run(measure)
