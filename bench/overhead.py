"""1, 8 and 32 jobs at once on one worker, as their subscribers see them, beside the bare loop and two other servers.

A job has a prompt of 64 random tokens and 128 output tokens. It is streamed through Redis and the client, and greedy,
sampled, or constrained by a JSON schema that needs more tokens than that. The worker and llama-server always have 32
slots, and the bare loop has 32 sequences. In every round each number and kind of jobs runs on all systems, directly
after each other and in turn, because other load on the machine changes within seconds. The fewer the jobs, the more
often they run. llama-cpp-python's own server computes one request at a time, so 32 jobs take minutes: one job runs
there once in each round, and several jobs in the first round only.

- `vs_bare`: tokens per second, divided by those of the bare loop directly before or after. The bare loop is greedy and
  has no sampler, so it is compared with all three kinds of jobs.
- `vs_peer`: tokens per second, divided by those of llama-server with the same kind of jobs directly before or after.
- `vs_python_server`: the same for llama-cpp-python's own server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import llama_cpp

from bare_loop import BareLoop
from cpu_clock import CpuClock
from harness import Figures, Plan, note, run, show
from job_timings import median_of, summarize
from llama_cpp_python_server import PYTHON_SERVER, PythonServer, schema_options, start_python_server
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import Tokenizer
from systems import LLAMA_SERVER, Systems, check_target, start_systems
from workload import Prompts, follow_all, greedy, sampled

N_PARALLEL = 32
NUMBERS, LARGE_NUMBERS, QUICK_NUMBERS = (1, 8, 32), (1, 8), (1, 4)
N_IN, N_OUT, LARGE_N_OUT, QUICK_N_OUT = 64, 128, 64, 16
LARGE_BYTES = 200 * 2**20
"""On a CPU, a model of this size gets fewer jobs and shorter outputs: a round takes minutes on two cores."""
TIMES = {1: 8, 8: 4, 32: 2}
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
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1}
PEER_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "schema": {"ignore_eos": False, "json_schema": SCHEMA},
}
"""What the requests to llama-server have besides the options of greedy decoding."""
PYTHON_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "schema": {"temperature": 0.0, **schema_options(SCHEMA)},
}
"""What the requests to llama-cpp-python's own server have."""
PEER_RATIOS = {LLAMA_SERVER: "vs_peer", PYTHON_SERVER: "vs_python_server"}
"""The figures of the worker that compare it with these systems."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """The systems of a run, and the prompts of their jobs."""

    systems: Systems
    python_server: PythonServer | None
    bare: BareLoop
    prompts: Prompts
    tokenizer: Tokenizer
    n_out: int

    def time_all(self, kind: str, number: int, turn: int, *, with_python_server: bool) -> Figures:
        """Run `number` jobs of a kind on one system after the other. With each `turn`, another system is first."""
        measures = {BARE: self._time_bare, WORKER: self._time_worker}
        if self.systems.llama_server is not None:
            measures[LLAMA_SERVER] = self._time_llama_server
        if self.python_server is not None and with_python_server:
            measures[PYTHON_SERVER] = self._time_python_server
        names = list(measures)
        first = turn % len(names)
        figures = {name: measures[name](kind, number) for name in names[first:] + names[:first]}
        rates = {name: figures[name]["tokens_per_s"] for name in names}
        for name in names[1:]:
            figures[name]["vs_bare"] = rates[name] / rates[BARE]
        for name, ratio in PEER_RATIOS.items():
            if name in rates:
                figures[WORKER][ratio] = rates[WORKER] / rates[name]
        note(f"{kind}, {number} at once, tokens/s: {', '.join(f'{name} {rate}' for name, rate in rates.items())}")
        return {name: figures[name] for name in names}

    def _time_bare(self, _: str, number: int) -> Figures:
        return self.bare.run(self._draw(number), self.n_out).summary()

    def _time_worker(self, kind: str, number: int) -> Figures:
        stack, options = self.systems.stack, KINDS[kind](self.n_out)
        clock = CpuClock(stack, WORKER)
        before = clock.read()
        figures = summarize(stack.run(partial(follow_all, self._draw(number), options), WORKER))
        return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["tokens"])}

    def _time_llama_server(self, kind: str, number: int) -> Figures:
        if self.systems.llama_server is None:
            raise RuntimeError("llama-server does not run")
        send = self.systems.llama_server.generate
        answers = send(self._draw(number), self.n_out, cache_prompt=False, options=PEER_OPTIONS[kind])
        return summarize([answer.timeline for answer in answers])

    def _time_python_server(self, kind: str, number: int) -> Figures:
        if self.python_server is None:
            raise RuntimeError(f"the server of {PYTHON_SERVER} does not run")
        texts = [self.prompts.text(N_IN, self.tokenizer) for _ in range(number)]
        return summarize(self.python_server.generate(texts, self.n_out, PYTHON_OPTIONS[kind]))

    def _draw(self, number: int) -> list[list[int]]:
        return self.prompts.several(number, N_IN)


def measure(plan: Plan) -> Figures:
    """Return the figures by number of jobs."""
    settings = plan.settings(n_parallel=N_PARALLEL)
    is_large = plan.model.stat().st_size >= LARGE_BYTES and not llama_cpp.llama_supports_gpu_offload()
    numbers, n_out = (LARGE_NUMBERS, LARGE_N_OUT) if is_large else (NUMBERS, N_OUT)
    if plan.quick:
        numbers, n_out = QUICK_NUMBERS, QUICK_N_OUT
    with (
        BareLoop(settings) as bare,
        start_systems({WORKER: settings}) as systems,
        start_python_server(settings, bare.end_tokens) as python_server,
    ):
        tokenizer = systems.stack.run(lambda client: client.tokenizer(), WORKER)
        overhead = Overhead(systems, python_server, bare, Prompts(plan.seed, bare.n_vocab), tokenizer, n_out)
        for kind in KINDS:
            replace(overhead, n_out=8).time_all(kind, max(numbers), 0, with_python_server=True)  # warm up
        measured: dict[tuple[int, str], list[Figures]] = {}
        for turn in range(plan.rounds):
            for number, kind in product(numbers, KINDS):
                for time in range(1 if plan.quick else TIMES.get(number, 1)):
                    is_first = time == 0 and (turn == 0 or number == 1)
                    figures = overhead.time_all(kind, number, turn + time, with_python_server=is_first)
                    measured.setdefault((number, kind), []).append(figures)
        peers = systems.describe_llama_server() | {"python_server": python_server.about if python_server else None}
    jobs = {str(number): {kind: median_of(measured[number, kind]) for kind in KINDS} for number in numbers}
    _show(jobs)
    sizes = {"slots": N_PARALLEL, "tokens_in": N_IN, "tokens_out": n_out}
    return sizes | {"jobs": jobs, "targets": _check(jobs, plan.model.name)} | peers


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
    ratios = ("vs_bare", *PEER_RATIOS.values())
    of_peers = (f"of {name}" for name in PEER_RATIOS)
    columns = ("jobs", "tok/s", "of bare", *of_peers, "TTFT p50", "p95", "ITL p50", "p95 ms")
    for kind in KINDS:
        rows = []
        for number, figures in jobs.items():
            one = figures[kind][WORKER]
            ttft, itl = one["ttft_ms"], one["itl_ms"]
            shown = (f"{one[ratio]:.2f}" if ratio in one else "-" for ratio in ratios)
            rows.append((number, one["tokens_per_s"], *shown, ttft["p50"], ttft["p95"], itl["p50"], itl["p95"]))
        show(f"worker, {kind}", columns, rows)
    systems = (BARE, WORKER, *PEER_RATIOS)
    rates = [
        (f"{kind}, {number}", *(figures[kind].get(name, {}).get("tokens_per_s", "-") for name in systems))
        for kind in KINDS
        for number, figures in jobs.items()
    ]
    show("tokens per second", ("kind, jobs", *systems), rates)


if __name__ == "__main__":
    run(measure)
