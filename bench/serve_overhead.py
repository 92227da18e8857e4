"""What does `llamaq serve` cost, compared with the Python client? llama-server is measured beside it, if installed.

`streams`: 64 streams at once through the Python client, through `serve` and through llama-server, in turn.
`vs_client` is the rate in tokens per second divided by that of the Python client in the same round.
`idle`: single requests on an idle worker, through the client and through `serve` in turn: time to the first token.
`cpu_us_per_token` is the processor time of each process, where `client` is the process that sends the requests.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from cpu_clock import CpuClock, cpu_s
from harness import START_TIMEOUT_S, Figures, Plan, Stack, note, run, show, start_stack
from http_streams import StreamConnection, complete_all, connected
from job_timings import Timeline, median_of, spread, summarize
from llama_server import LlamaServer, start_llama_server
from llamaq.common.errors import LlamaqError
from llamaq.producer import AsyncClient
from systems import LLAMA_SERVER, check_target
from workload import Prompts, follow, follow_all, greedy

N_STREAMS, QUICK_N_STREAMS = 64, 4
N_IN, N_OUT, QUICK_N_OUT = 32, 128, 8
N_CTX = 16_384
"""Room for all streams at once, so that no job is preempted."""
N_SINGLE, QUICK_N_SINGLE = 60, 3
SINGLE_N_OUT = 4
PAUSE_S = 0.02
"""Pause before each single request, so that the worker has reported the end of the previous job."""
CLIENT, SERVE = "client", "serve"
RATE_TARGET = 0.92
"""Smallest rate of `serve`, as a share of that of the Python client."""
TTFT_TARGET_MS = 3.0
"""Largest median of the time to the first token that `serve` may add."""


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running `llamaq serve`."""

    url: str
    pid: int


@contextmanager
def start_serve(redis_url: str) -> Iterator[HttpServer]:
    """Start `llamaq serve` as a user does."""
    command = [sys.executable, "-c", "from llamaq.cli.entry_point import main; main()", "serve", "--http-port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    process = subprocess.Popen(
        command, env=environment | {"LLAMAQ_REDIS_URL": redis_url}, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield HttpServer(_await_ready(process), process.pid)
    finally:
        process.terminate()
        process.communicate()


def _await_ready(process: subprocess.Popen[bytes]) -> str:
    if process.stderr is None:
        raise RuntimeError("llamaq serve was started without a pipe")
    lines: list[bytes] = []
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while select.select([process.stderr], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        lines.append(process.stderr.readline())
        if not lines[-1]:
            break
        _, is_ready, url = lines[-1].decode().partition("http.ready url=")
        if is_ready:
            return url.strip()
    raise LlamaqError(f"llamaq serve did not start: {b''.join(lines).decode(errors='replace')[-2000:]}")


@dataclass(frozen=True, slots=True)
class Systems:
    """What is compared."""

    stack: Stack
    serve: HttpServer
    llama_server: LlamaServer | None

    @property
    def names(self) -> list[str]:
        return [CLIENT, SERVE, *([LLAMA_SERVER] if self.llama_server else [])]

    def generate(self, name: str, prompts: list[list[int]], n_out: int) -> list[Timeline]:
        """Send all prompts at once through one of the systems."""
        if name == CLIENT:
            return self.stack.run(partial(follow_all, prompts, greedy(n_out)))
        url = self.serve.url if self.llama_server is None or name == SERVE else self.llama_server.url
        return asyncio.run(complete_all(url, prompts, n_out))


def time_streams(systems: Systems, prompts: Prompts, plan: Plan, first: int) -> dict[str, Any]:
    """Measure each system with the same number of streams at once. `first` is the index of the system that begins."""
    n_streams, n_out = (QUICK_N_STREAMS, QUICK_N_OUT) if plan.quick else (N_STREAMS, N_OUT)
    clock, names = CpuClock(systems.stack), systems.names
    figures: dict[str, Any] = {}
    for name in names[first % len(names) :] + names[: first % len(names)]:
        before, serve_s = clock.read(), cpu_s(systems.serve.pid)
        one = summarize(systems.generate(name, prompts.several(n_streams, N_IN), n_out))
        used = clock.us_per_token(before, one["tokens"])
        used[SERVE] = round((cpu_s(systems.serve.pid) - serve_s) * 1e6 / one["tokens"], 1)
        figures[name] = one | {"cpu_us_per_token": used}
    for one in figures.values():
        one["vs_client"] = round(one["tokens_per_s"] / figures[CLIENT]["tokens_per_s"], 4)
    note("tokens/s: " + ", ".join(f"{name} {figures[name]['tokens_per_s']}" for name in names))
    return {name: figures[name] for name in names}


async def time_idle(systems: Systems, prompts: Prompts, n_single: int) -> dict[str, Any]:
    """Return the times to the first token of single requests through the client and through `serve`, in turn."""
    times: dict[str, list[float]] = {CLIENT: [], SERVE: []}
    async with AsyncClient(systems.stack.redis.url) as client, connected(systems.serve.url, 1) as (connection,):
        for number in range(2 * n_single + 2):
            await asyncio.sleep(PAUSE_S)
            name = (CLIENT, SERVE)[number % 2]
            timeline = await _single(client, connection, name, prompts.tokens(N_IN))
            if number > 1:  # the first ones open connections
                times[name].append(timeline.ttft_ms)
    figures: dict[str, Any] = {name: spread(values) for name, values in times.items()}
    figures["added_ms"] = round(figures[SERVE]["p50"] - figures[CLIENT]["p50"], 3)
    return figures


async def _single(client: AsyncClient, connection: StreamConnection, name: str, prompt: list[int]) -> Timeline:
    if name == SERVE:
        return await connection.complete(prompt, SINGLE_N_OUT)
    return await follow(client, prompt, **greedy(SINGLE_N_OUT))


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    settings = plan.settings(n_parallel=QUICK_N_STREAMS if plan.quick else N_STREAMS, n_ctx=N_CTX)
    with ExitStack() as exits:
        stack = exits.enter_context(start_stack([settings]))
        serve = exits.enter_context(start_serve(stack.redis.url))
        systems = Systems(stack, serve, exits.enter_context(start_llama_server(settings)))
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        time_streams(systems, prompts, plan, 0)  # warm up
        streams = median_of([time_streams(systems, prompts, plan, number) for number in range(plan.rounds)])
        n_single = QUICK_N_SINGLE if plan.quick else N_SINGLE
        idle = median_of([asyncio.run(time_idle(systems, prompts, n_single)) for _ in range(plan.rounds)])
        peer = None if systems.llama_server is None else systems.llama_server.describe()
    _show(streams, idle)
    targets = {
        "vs_client": check_target(streams[SERVE]["vs_client"], at_least=RATE_TARGET),
        "added_ttft_ms": check_target(idle["added_ms"], at_most=TTFT_TARGET_MS),
    }
    return {"streams": streams, "idle": idle, "targets": targets, "peer": peer}


def _show(streams: dict[str, Any], idle: dict[str, Any]) -> None:
    columns = ("system", "tok/s", "of client", "TTFT p50", "ITL p50", "p95 ms")
    rows = []
    for name, one in streams.items():
        itl = one["itl_ms"]
        rows.append(
            (name, one["tokens_per_s"], f"{one['vs_client']:.2f}", one["ttft_ms"]["p50"], itl["p50"], itl["p95"])
        )
    show("streams at once", columns, rows)
    used = [(name, *one["cpu_us_per_token"].values()) for name, one in streams.items()]
    show("processor time, microseconds per token", ("system", *streams[SERVE]["cpu_us_per_token"]), used)
    show(
        "single requests on an idle worker, time to the first token in ms",
        ("system", "p50", "p95"),
        [(name, idle[name]["p50"], idle[name]["p95"]) for name in (CLIENT, SERVE)],
    )


if __name__ == "__main__":
    run(measure)
