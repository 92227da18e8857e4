"""1, 8 and 32 jobs at once on one worker, as their subscribers see them, beside the bare loop and llama-server.

A job has a prompt of 64 random tokens and 128 output tokens. It is streamed through Redis and the client, and greedy,
sampled, or constrained by a JSON schema that needs more tokens than that. The worker and llama-server always have 32
slots, and the bare loop has 32 sequences. In every round each number and kind of jobs runs on all systems, directly
after each other and in turn, because other load on the machine changes within seconds. One job takes little time, so it
runs several times.

- `vs_bare`: tokens per second, divided by those of the bare loop directly before or after. The bare loop is greedy and
  has no sampler, so it is compared with all three kinds of jobs.
- `vs_peer`: tokens per second, divided by those of llama-server with the same kind of jobs directly before or after.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import llama_cpp

from bare_loop import BareLoop
from cpu_clock import CpuClock
from harness import Figures, Plan, note, run, show
from job_timings import median_of, summarize
from llamaq.common.protocol.job_request import JobOptions
from systems import LLAMA_SERVER, Systems, check_target, start_systems
from workload import Prompts, follow_all, greedy, sampled

N_PARALLEL = 32
NUMBERS, LARGE_NUMBERS, QUICK_NUMBERS = (1, 8, 32), (1, 8), (1, 4)
N_IN, N_OUT, LARGE_N_OUT, QUICK_N_OUT = 64, 128, 64, 16
LARGE_BYTES = 200 * 2**20
"""On a CPU, a model of this size gets fewer jobs and shorter outputs: a round takes minutes on two cores."""
TIMES = {1: 4}
"""How often a number of jobs runs in each round, if more than once."""
WORKER, BARE = "worker", "bare"
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


@dataclass(frozen=True, slots=True)
class Overhead:
    """The systems of a run, and the prompts of their jobs."""

    systems: Systems
    bare: BareLoop
    prompts: Prompts
    n_out: int

    def time_all(self, kind: str, number: int, turn: int) -> Figures:
        """Run `number` jobs of a kind on one system after the other. With each `turn`, another system is first."""
        measures = {BARE: self._time_bare, WORKER: self._time_worker}
        if self.systems.llama_server is not None:
            measures[LLAMA_SERVER] = self._time_peer
        names = list(measures)
        first = turn % len(names)
        figures = {name: measures[name](kind, number) for name in names[first:] + names[:first]}
        for name in names[1:]:
            figures[name]["vs_bare"] = figures[name]["tokens_per_s"] / figures[BARE]["tokens_per_s"]
        if LLAMA_SERVER in figures:
            figures[WORKER]["vs_peer"] = figures[WORKER]["tokens_per_s"] / figures[LLAMA_SERVER]["tokens_per_s"]
        rates = ", ".join(f"{name} {figures[name]['tokens_per_s']}" for name in names)
        note(f"{kind}, {number} at once, tokens/s: {rates}")
        return {name: figures[name] for name in names}

    def _time_bare(self, _: str, number: int) -> Figures:
        return self.bare.run(self._draw(number), self.n_out).summary()

    def _time_worker(self, kind: str, number: int) -> Figures:
        stack, options = self.systems.stack, KINDS[kind](self.n_out)
        clock = CpuClock(stack, WORKER)
        before = clock.read()
        figures = summarize(stack.run(partial(follow_all, self._draw(number), options), WORKER))
        return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["tokens"])}

    def _time_peer(self, kind: str, number: int) -> Figures:
        if self.systems.llama_server is None:
            raise RuntimeError("llama-server does not run")
        send = self.systems.llama_server.generate
        answers = send(self._draw(number), self.n_out, cache_prompt=False, options=PEER_OPTIONS[kind])
        return summarize([answer.timeline for answer in answers])

    def _draw(self, number: int) -> list[list[int]]:
        return self.prompts.several(number, N_IN)


def measure(plan: Plan) -> Figures:
    """Return the figures by number of jobs."""
    settings = plan.settings(n_parallel=N_PARALLEL)
    is_large = plan.model.stat().st_size >= LARGE_BYTES and not llama_cpp.llama_supports_gpu_offload()
    numbers, n_out = (LARGE_NUMBERS, LARGE_N_OUT) if is_large else (NUMBERS, N_OUT)
    if plan.quick:
        numbers, n_out = QUICK_NUMBERS, QUICK_N_OUT
    with BareLoop(settings) as bare, start_systems({WORKER: settings}) as systems:
        prompts = Prompts(plan.seed, bare.n_vocab)
        for kind in KINDS:
            Overhead(systems, bare, prompts, n_out=8).time_all(kind, max(numbers), 0)  # warm up
        overhead = Overhead(systems, bare, prompts, n_out)
        measured: dict[tuple[int, str], list[Figures]] = {}
        for turn in range(plan.rounds):
            for number, kind in product(numbers, KINDS):
                for time in range(1 if plan.quick else TIMES.get(number, 1)):
                    measured.setdefault((number, kind), []).append(overhead.time_all(kind, number, turn + time))
        peer = systems.describe_llama_server()
    jobs = {str(number): {kind: median_of(measured[number, kind]) for kind in KINDS} for number in numbers}
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
            rates = (figures[kind][BARE]["tokens_per_s"], peer.get("tokens_per_s", "-"))
            rows.append((number, one["tokens_per_s"], *ratios, *times, *rates))
        show(f"worker, {kind}", columns, rows)


if __name__ == "__main__":
    run(measure)
