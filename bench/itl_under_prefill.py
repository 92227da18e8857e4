"""What do seven streams see while a prompt of 4,000 tokens is computed, with each batch strategy and on llama-server?

Each strategy has a worker. The streams run on one system, and when all of them have begun, the prompt arrives. All
systems take turns in every round, with the same load.

- `gap_ms`: the gaps of all streams from the submit of the prompt to its first token.
- `n_ended_early`: the number of streams that ended before that. It is 0, unless the machine is very busy.
- `ttft_long_ms`: the time from the submit of the prompt to its first token.
- `target_ms`: the target of `latency-target` (`--target-itl-ms`): four ticks of the streams alone, as the bare loop
  takes them on this machine.
- `vs_peer`: the percentile 95 of the gaps, divided by llama-server's in the same round.

Targets: the percentile 95 of the gaps is at most the target, and at most half of llama-server's.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import Any

from bare_loop import BareLoop
from harness import Figures, Plan, note, run, show, start_stack
from job_timings import median_of, spread
from llama_server import LlamaServer, start_llama_server
from llamaq.worker.plugins import BUILT_IN
from llamaq.worker.settings import WorkerSettings
from streams_beside_prompt import N_IN, Load, Timelines, run_on_worker, run_over_http
from systems import LLAMA_SERVER, check_target
from workload import Prompts

N_STREAMS, QUICK_N_STREAMS = 7, 2
N_LONG, QUICK_N_LONG = 4000, 200
N_OUT, QUICK_N_OUT = 1024, 64
N_CTX = 16_384
"""Room for the streams and the long prompt, so that no job is preempted."""
TARGET_TICKS = 4
PEER_RATIO = 0.5
LATENCY_TARGET = "latency-target"


def measure_target_ms(settings: WorkerSettings, n_streams: int, seed: int) -> float:
    """Return the target: four ticks of the streams alone."""
    with BareLoop(settings) as bare:
        prompts = Prompts(seed, bare.n_vocab).several(n_streams, N_IN)
        bare.run(prompts, 8)  # warm up
        tick_s = sorted(bare.run(prompts, 64).tick_s)
    return round(TARGET_TICKS * tick_s[len(tick_s) // 2] * 1000, 1)


def summarize(timelines: Timelines) -> Figures:
    """Return the figures of one round of one system."""
    gaps_ms = [(after - before) * 1000 for before, after in timelines.gaps]
    alone_ms = [gap for stream in timelines.streams for gap in stream.gaps_ms[:20]]
    return {
        "gap_ms": spread(gaps_ms),
        "n_gaps": len(gaps_ms),
        "n_ended_early": timelines.n_ended_early,
        "ttft_long_ms": round(timelines.long.ttft_ms, 1),
        "gap_alone_ms": spread(alone_ms),
    }


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by system."""
    n_streams, n_long, n_out = (
        (QUICK_N_STREAMS, QUICK_N_LONG, QUICK_N_OUT) if plan.quick else (N_STREAMS, N_LONG, N_OUT)
    )
    base = plan.settings(n_parallel=n_streams + 1, n_ctx=4096 if plan.quick else N_CTX)
    target_ms = measure_target_ms(base, n_streams, plan.seed)
    strategies = [LATENCY_TARGET] if plan.quick else list(BUILT_IN)
    note(f"target: {target_ms} ms")
    with ExitStack() as exits:
        stack = exits.enter_context(start_stack([_worker(base, name, target_ms) for name in strategies]))
        llama_server = exits.enter_context(start_llama_server(base))
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        names = [*strategies, *([LLAMA_SERVER] if llama_server else [])]
        rounds: list[dict[str, Figures]] = []
        for index in range(plan.rounds if plan.quick else plan.rounds + 1):
            load = Load.draw(prompts, n_streams, n_long, n_out)
            figures: dict[str, Figures] = {}
            for name in names[index % len(names) :] + names[: index % len(names)]:
                on_worker = partial(stack.run, partial(run_on_worker, load), name)
                figures[name] = summarize(_run_on_peer(load, llama_server) if name == LLAMA_SERVER else on_worker())
            if index or plan.quick:  # the first round warms up
                rounds.append(_with_ratios({name: figures[name] for name in names}))
                note("gap p95 ms: " + ", ".join(f"{name} {figures[name]['gap_ms']['p95']}" for name in names))
    systems = median_of(rounds)
    _show(systems, target_ms)
    sizes = {"streams": n_streams, "prompt_tokens": n_long, "target_ms": target_ms}
    peer = {"peer": llama_server.describe() if llama_server else None}
    return sizes | {"systems": systems, "targets": _check(systems, target_ms)} | peer


def _worker(base: WorkerSettings, name: str, target_ms: float) -> WorkerSettings:
    target = {"target_itl_ms": target_ms} if name == LATENCY_TARGET else {}
    return base.model_copy(update={"queue": name, "batch_strategy": name, **target})


def _run_on_peer(load: Load, llama_server: LlamaServer | None) -> Timelines:
    if llama_server is None:
        raise RuntimeError("llama-server does not run")
    return asyncio.run(run_over_http(load, llama_server.url))


def _with_ratios(figures: dict[str, Figures]) -> dict[str, Figures]:
    if peer := figures.get(LLAMA_SERVER):
        for one in figures.values():
            one["vs_peer"] = round(one["gap_ms"]["p95"] / peer["gap_ms"]["p95"], 4)
            one["ttft_vs_peer"] = round(one["ttft_long_ms"] / peer["ttft_long_ms"], 4)
    return figures


def _check(systems: dict[str, Any], target_ms: float) -> Figures:
    one = systems[LATENCY_TARGET]
    checks = {"gap_p95_ms": check_target(one["gap_ms"]["p95"], at_most=target_ms)}
    if "vs_peer" in one:
        checks["gap_p95_vs_peer"] = check_target(one["vs_peer"], at_most=PEER_RATIO)
    return checks


def _show(systems: dict[str, Any], target_ms: float) -> None:
    rows = []
    for name, one in systems.items():
        gap = one["gap_ms"]
        ratio = f"{one['vs_peer']:.2f}" if "vs_peer" in one else "-"
        rows.append((name, gap["p50"], gap["p95"], gap["max"], ratio, one["ttft_long_ms"], one["gap_alone_ms"]["p50"]))
    columns = ("system", "gap p50", "p95", "max ms", "p95 of peer", "TTFT of long", "gap p50 alone")
    show(f"streams while a long prompt is computed, target {target_ms} ms", columns, rows)


if __name__ == "__main__":
    run(measure)
