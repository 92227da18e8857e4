"""What do 2,000 open streams cost one process of `llamaq serve`? No model runs: a fake worker writes a token of each
stream every five seconds.

`kb_per_stream`: memory of the server for each stream. `core_percent`: share of one core while the streams stand open.
`health_ms` and `ttft_ms`: time of health requests, and of new streams to their first text, meanwhile.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from client_cost import LEASE_MS
from cpu_clock import cpu_s
from harness import Figures, Plan, note, run, show
from http_streams import StreamConnection, connected
from job_timings import median_of, spread
from llamaq.producer.testing import FakeAttempt, FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from process_memory import resident_kb
from serve_overhead import start_serve

N_STREAMS, QUICK_N_STREAMS = 2000, 20
N_PROBES, QUICK_N_PROBES = 40, 3
AT_ONCE = 50
"""Number of streams that are opened together, and of tokens that the fake worker writes in one command."""
PERIOD_S = 5.0
WATCH_S, QUICK_WATCH_S = 10.0, 0.5
PROMPT, N_OUT = [1, 2, 3], 1000
READY = b"ready\n"


async def be_worker(url: str) -> None:
    """Start every job that arrives, and write one token of each every `PERIOD_S` seconds."""
    async with FakeWorker(url, "default") as worker:
        await worker.announce()
        print(READY.decode().strip(), flush=True)
        attempts: list[FakeAttempt] = []

        async def start_jobs() -> None:
            while True:
                attempt = await worker.start_next()
                await attempt.emit([1], " word")
                attempts.append(attempt)

        starting = asyncio.create_task(start_jobs())
        while not starting.done():
            await asyncio.sleep(PERIOD_S)
            running = list(attempts)
            for begin in range(0, len(running), AT_ONCE):
                await _write_token(worker, running[begin : begin + AT_ONCE])
        await starting


async def _write_token(worker: FakeWorker, attempts: list[FakeAttempt]) -> None:
    increments = [attempt.increment([1], " word", offset=attempt.stored) for attempt in attempts]
    await worker.scripts.flush(increments, lease_ms=LEASE_MS, renew=True)
    for attempt in attempts:
        attempt.text += " word"
        attempt.stored += 1


@asynccontextmanager
async def working(url: str) -> AsyncIterator[None]:
    """Run `be_worker` in another process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "work", url, stdout=asyncio.subprocess.PIPE
    )
    try:
        if process.stdout is None or await process.stdout.readline() != READY:
            raise RuntimeError("the fake worker did not start")
        yield
    finally:
        process.kill()
        await process.wait()


async def measure_round(redis_url: str, server_url: str, pid: int, plan: Plan) -> dict[str, Any]:
    """Open the streams, and return the figures while they stand open."""
    n_streams, n_probes, watch_s = (
        (QUICK_N_STREAMS, QUICK_N_PROBES, QUICK_WATCH_S) if plan.quick else (N_STREAMS, N_PROBES, WATCH_S)
    )
    async with working(redis_url), connected(server_url, 1) as (probe,):
        await probe.begin(PROMPT, N_OUT)
        before_kb = resident_kb(pid)
        async with AsyncExitStack() as open_:
            for _ in range(0, n_streams, AT_ONCE):
                streams = await open_.enter_async_context(connected(server_url, min(AT_ONCE, n_streams)))
                await asyncio.gather(*(each.begin(PROMPT, N_OUT) for each in streams))
            grown_kb, used_s = resident_kb(pid) - before_kb, cpu_s(pid)
            await asyncio.sleep(watch_s)
            used_s = cpu_s(pid) - used_s
            health_ms = [await time_health(server_url) for _ in range(n_probes)]
            ttft_ms = [await time_first_text(server_url) for _ in range(n_probes)]
    note(f"{n_streams} streams: {grown_kb / n_streams:.1f} KB each")
    return {
        "streams": n_streams,
        "kb_per_stream": round(grown_kb / n_streams, 1),
        "core_percent": round(used_s / watch_s * 100, 1),
        "health_ms": spread(health_ms),
        "ttft_ms": spread(ttft_ms),
    }


async def time_health(url: str) -> float:
    """Return the milliseconds that a health request takes."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        start_s = time.perf_counter()
        (await http.get("/health")).raise_for_status()
        return (time.perf_counter() - start_s) * 1000


async def time_first_text(url: str) -> float:
    """Return the milliseconds until a new stream has its first text."""
    connection: StreamConnection
    async with connected(url, 1) as (connection,):
        return (await connection.begin(PROMPT, N_OUT)).ttft_ms


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rounds = []
    for _ in range(plan.rounds):
        with EmbeddedRedis() as redis, start_serve(redis.url) as server:
            rounds.append(asyncio.run(measure_round(redis.url, server.url, server.pid, plan)))
    figures = median_of(rounds)
    rows = [
        ("memory of a stream, KB", figures["kb_per_stream"]),
        ("one core while they are open, %", figures["core_percent"]),
        ("a health request, ms, p50", figures["health_ms"]["p50"]),
        ("a health request, ms, largest", figures["health_ms"]["max"]),
        ("the first text of a new stream, ms, p50", figures["ttft_ms"]["p50"]),
        ("the first text of a new stream, ms, largest", figures["ttft_ms"]["max"]),
    ]
    show(f"{figures['streams']} open streams", ("", ""), rows)
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        asyncio.run(be_worker(sys.argv[2]))
    else:
        run(measure)
