"""1, 8 and 32 jobs at once on one worker, as their subscribers see them, beside the bare loop and llama-server.

A job has a prompt of 64 random tokens and 128 output tokens. It is streamed through Redis and the client, and greedy,
sampled, or constrained by a JSON schema that needs more tokens than that. The worker and llama-server always have 32
slots, and the bare loop has 32 sequences. In every round each number of jobs runs on all systems, which take turns.

- `vs_bare`: tokens per second, divided by those of the bare loop in the same round. The bare loop is greedy and has no
  sampler, so it is compared with all three kinds of jobs.
- `vs_peer`: tokens per second, divided by those of llama-server with the same kind of jobs in the same round.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import llama_cpp

from bare_loop import BareLoop
from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show
from job_timings import median_of, summarize
from llamaq.common.protocol.job_request import JobOptions
from systems import LLAMA_SERVER, Systems, check_target, start_systems
from workload import Prompts, follow_all, greedy, sampled

N_PARALLEL = 32
NUMBERS, LARGE_NUMBERS, QUICK_NUMBERS = (1, 8, 32), (1, 8), (1, 4)
N_IN, N_OUT, LARGE_N_OUT, QUICK_N_OUT = 64, 128, 64, 16
LARGE_BYTES = 200 * 2**20
"""On a CPU, a model of this size gets fewer jobs and shorter outputs: a round takes minutes on two cores."""
WORKER = "worker"
WORDS = ("alpha", "bravo", "charlie", "delta")
SCHEMA = {"type": "array", "items": {"enum": list(WORDS)}, "minItems": 200, "maxItems": 200}
"""The output is longer than a job's tokens, whatever the model prefers."""
BARE_TARGETS = {
    "tiny": {"greedy": {"1": 0.90, "8": 0.95, "32": 0.95}, "sampled": {"1": 0.80, "8": 0.85, "32": 0.85}},
    "qwen3-0.6b": {"greedy": {"1": 0.97, "8": 0.97}, "sampled": {"1": 0.97, "8": 0.97}},
}
PEER_TARGETS = {"tiny": {"1": 1.0, "8": 1.4, "32": 1.4}, "qwen3-0.6b": {"1": 1.0, "8": 1.0}}


def constrained(max_tokens: int) -> JobOptions:
    """Return options for greedy decoding that a JSON schema constrains."""
    return {"temperature": 0.0, "json_schema": SCHEMA, "max_tokens": max_tokens}


KINDS = {"greedy": greedy, "sampled": sampled, "schema": constrained}
PEER_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1},
    "schema": {"ignore_eos": False, "json_schema": SCHEMA},
}
"""What the requests to llama-server have besides the options of greedy decoding."""


def time_worker(stack: Stack, prompts: list[list[int]], options: JobOptions) -> dict[str, Any]:
    """Run these prompts as jobs at once and return the figures."""
    clock = CpuClock(stack, WORKER)
    before = clock.read()
    figures = summarize(stack.run(partial(follow_all, prompts, options), WORKER))
    return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["tokens"])}


def time_peer(systems: Systems, kind: str, prompts: list[list[int]], n_out: int) -> dict[str, Any]:
    """Send these prompts to llama-server at once and return the figures."""
    if systems.llama_server is None:
        raise RuntimeError("llama-server does not run")
    answers = systems.llama_server.generate(prompts, n_out, cache_prompt=False, options=PEER_OPTIONS[kind])
    return summarize([answer.timeline for answer in answers])


def time_all(systems: Systems, bare: BareLoop, prompts: Prompts, number: int, n_out: int, turn: int) -> dict[str, Any]:
    """Run one round with `number` jobs of each kind on all systems. With each `turn`, another system is first."""
    figures: dict[str, Any] = {"bare": bare.run(prompts.several(number, N_IN), n_out).summary()}
    for kind, options in KINDS.items():
        names = [WORKER, *([LLAMA_SERVER] if systems.llama_server else [])]
        one: dict[str, Any] = {}
        for name in names if turn % 2 else names[::-1]:
            drawn = prompts.several(number, N_IN)
            if name == WORKER:
                one[name] = time_worker(systems.stack, drawn, options(n_out))
            else:
                one[name] = time_peer(systems, kind, drawn, n_out)
        for system in one.values():
            system["vs_bare"] = system["tokens_per_s"] / figures["bare"]["tokens_per_s"]
        if LLAMA_SERVER in one:
            one[WORKER]["vs_peer"] = one[WORKER]["tokens_per_s"] / one[LLAMA_SERVER]["tokens_per_s"]
        figures[kind] = {name: one[name] for name in names}
    note(f"{number} at once, tokens/s: {_rates(figures)}")
    return figures


def _rates(figures: dict[str, Any]) -> str:
    parts = [f"bare {figures['bare']['tokens_per_s']}"]
    for kind in KINDS:
        rates = [f"{name} {one['tokens_per_s']}" for name, one in figures[kind].items()]
        parts.append(f"{kind} {', '.join(rates)}")
    return "; ".join(parts)


def measure(plan: Plan) -> Figures:
    """Return the figures by number of jobs."""
    settings = plan.settings(n_parallel=N_PARALLEL)
    is_large = plan.model.stat().st_size >= LARGE_BYTES and not llama_cpp.llama_supports_gpu_offload()
    numbers, n_out = (LARGE_NUMBERS, LARGE_N_OUT) if is_large else (NUMBERS, N_OUT)
    if plan.quick:
        numbers, n_out = QUICK_NUMBERS, QUICK_N_OUT
    with BareLoop(settings) as bare, start_systems({WORKER: settings}) as systems:
        prompts = Prompts(plan.seed, bare.n_vocab)
        time_all(systems, bare, prompts, max(numbers), 8, 0)  # warm up
        rounds: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
        for turn in range(plan.rounds):
            for number in numbers:
                rounds[number].append(time_all(systems, bare, prompts, number, n_out, turn))
        peer = systems.describe_llama_server()
    jobs = {str(number): median_of(figures) for number, figures in rounds.items()}
    _show(jobs)
    sizes = {"slots": N_PARALLEL, "tokens_in": N_IN, "tokens_out": n_out}
    return sizes | {"jobs": jobs, "targets": _check(jobs, plan.model.name)} | peer


def _check(jobs: dict[str, Any], file_name: str) -> Figures:
    """Return the targets that these figures of a model have."""
    checks: Figures = {}
    model = next((name for name in BARE_TARGETS if file_name.startswith(name)), None)
    if model is None:
        return checks
    peer_targets = PEER_TARGETS[model]
    for kind, targets in BARE_TARGETS[model].items():
        for number, figures in jobs.items():
            worker = figures[kind][WORKER]
            if number in targets:
                checks[f"{kind}_{number}_vs_bare"] = check_target(worker["vs_bare"], at_least=targets[number])
            if number in targets and "vs_peer" in worker:
                checks[f"{kind}_{number}_vs_peer"] = check_target(worker["vs_peer"], at_least=peer_targets[number])
    return checks


def _show(jobs: dict[str, Any]) -> None:
    columns = ("jobs", "tok/s", "of bare", "of peer", "TTFT p50", "p95", "ITL p50", "p95 ms", "bare", "peer tok/s")
    for kind in KINDS:
        rows = []
        for number, figures in jobs.items():
            one, peer = figures[kind][WORKER], figures[kind].get(LLAMA_SERVER, {})
            ttft, itl = one["ttft_ms"], one["itl_ms"]
            ratios = (f"{one['vs_bare']:.0%}", f"{one['vs_peer']:.2f}" if peer else "-")
            times = (ttft["p50"], ttft["p95"], itl["p50"], itl["p95"])
            rates = (figures["bare"]["tokens_per_s"], peer.get("tokens_per_s", "-"))
            rows.append((number, one["tokens_per_s"], *ratios, *times, *rates))
        show(f"worker, {kind}", columns, rows)


if __name__ == "__main__":
    run(measure)
