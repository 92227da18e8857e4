"""What does following jobs cost a client? No model runs: a fake worker in another process writes the tokens.

`streams`: processor time of the client process for each token, while 1 and 400 streams receive 20 tokens per second
each. `idle_waiters`: share of one core that thousands of `result()` calls use while their jobs wait. `long_prompt`: the
longest time for which the submit of a prompt of 800,000 token ids stops the event loop of the client.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from harness import Figures, Plan, note, run, show
from job_timings import median_of
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import FakeAttempt, FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

STREAM_COUNTS, QUICK_STREAM_COUNTS = (1, 400), (1, 20)
TOKENS_PER_S, N_TOKENS, QUICK_N_TOKENS = 20.0, 100, 5
N_WARM_UP_TOKENS = 20
LEASE_MS = 60_000
N_WAITERS, QUICK_N_WAITERS = 10_000, 200
STARTED_S, FIRST_S, LATER_S, QUICK_S = 3.0, 30.0, 60.0, 0.3
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 800_000, 20_000


async def write_tokens(url: str, queue: str, n_jobs: int, n_tokens: int) -> None:
    """Be the worker: start the jobs, then write one token of each of them `TOKENS_PER_S` times a second."""
    async with FakeWorker(url, queue) as worker:
        await worker.announce()
        attempts = [await worker.start_next() for _ in range(n_jobs)]
        next_s = time.monotonic()
        for number in range(n_tokens):
            next_s += 1 / TOKENS_PER_S
            await asyncio.sleep(next_s - time.monotonic())
            await _flush(worker, attempts, number)
        for attempt in attempts:
            attempt.tokens = list(range(n_tokens))
            await attempt.finish()


async def _flush(worker: FakeWorker, attempts: list[FakeAttempt], number: int) -> None:
    increments = [attempt.increment([number], " word", offset=number) for attempt in attempts]
    await worker.scripts.flush(increments, lease_ms=LEASE_MS, renew=False)
    for attempt in attempts:
        attempt.text += " word"
        attempt.stored = number + 1


class Readers:
    """Reads the streams of jobs, and notes the processor time when they have this number of tokens together."""

    def __init__(self, n_warm_up: int, n_all: int) -> None:
        self.n_tokens = 0
        self.used_s: dict[int, float] = {n_warm_up: 0.0, n_all: 0.0}

    async def read(self, job: AsyncJob) -> None:
        """Read one job to its end."""
        async for chunk in job.stream():
            for _ in chunk.tokens:
                self.n_tokens += 1
                if self.n_tokens in self.used_s:
                    self.used_s[self.n_tokens] = time.process_time()


async def time_streams(client: AsyncClient, n_jobs: int, n_tokens: int) -> dict[str, float]:
    """Return the client's processor time for each token of these streams."""
    jobs = [await client.submit("x", max_tokens=n_tokens) for _ in range(n_jobs)]
    n_warm_up, n_all = n_jobs * N_WARM_UP_TOKENS, n_jobs * (N_WARM_UP_TOKENS + n_tokens)
    readers = Readers(n_warm_up, n_all)
    async with asyncio.TaskGroup() as tasks, _writing(client, n_jobs, N_WARM_UP_TOKENS + n_tokens):
        for job in jobs:
            tasks.create_task(readers.read(job))
    used_s = readers.used_s[n_all] - readers.used_s[n_warm_up]
    return {"tokens": n_all - n_warm_up, "cpu_us_per_token": used_s / (n_all - n_warm_up) * 1e6}


@asynccontextmanager
async def _writing(client: AsyncClient, n_jobs: int, n_tokens: int) -> AsyncIterator[None]:
    """Run `write_tokens` in another process, so that only the client's work is measured."""
    arguments = (client.settings.redis_url, client.queue, str(n_jobs), str(n_tokens))
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "write", *arguments)
    try:
        yield
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def time_idle_waiters(client: AsyncClient, n_jobs: int, first_s: float, later_s: float) -> dict[str, float]:
    """Return the share of one core that this number of calls of `result` use while no job makes progress."""
    jobs = [await client.submit("x") for _ in range(n_jobs)]
    waiting = [asyncio.create_task(job.result(timeout=3600)) for job in jobs]
    while client.subscriber.n_confirmed < n_jobs:  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.05)
    await asyncio.sleep(STARTED_S)  # the first read of each job
    first = await _core_share(first_s)
    later = await _core_share(later_s)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return {"waiters": n_jobs, "core_percent_first": first, "core_percent_later": later}


async def _core_share(duration_s: float) -> float:
    before_s = time.process_time()
    await asyncio.sleep(duration_s)
    return (time.process_time() - before_s) / duration_s * 100


async def time_long_prompt(client: AsyncClient, n_tokens: int) -> dict[str, float]:
    """Return how long the event loop stands still at most while a long prompt is submitted."""
    prompt = [number % 150_000 for number in range(n_tokens)]
    await client.submit(tokens=prompt[:10])
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - before_s)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    start_s = time.perf_counter()
    job = await client.submit(tokens=prompt)
    submit_ms = (time.perf_counter() - start_s) * 1000
    await asyncio.sleep(0)
    watching.cancel()
    await job.cancel()
    return {"prompt_tokens": n_tokens, "loop_blocked_ms": longest_s * 1000, "submit_ms": submit_ms}


async def measure_round(url: str, number: int, plan: Plan) -> dict[str, Any]:
    """Run one round and return its figures."""
    n_tokens = QUICK_N_TOKENS if plan.quick else N_TOKENS
    n_waiters = QUICK_N_WAITERS if plan.quick else N_WAITERS
    first_s, later_s = (QUICK_S, QUICK_S) if plan.quick else (FIRST_S, LATER_S)
    figures: dict[str, Any] = {"streams": {}}
    for n_streams in QUICK_STREAM_COUNTS if plan.quick else STREAM_COUNTS:
        async with AsyncClient(url, f"streams-{number}-{n_streams}") as client:
            figures["streams"][str(n_streams)] = await time_streams(client, n_streams, n_tokens)
    async with AsyncClient(url, f"waiters-{number}") as client:
        figures["idle_waiters"] = await time_idle_waiters(client, n_waiters, first_s, later_s)
    async with AsyncClient(url, f"prompt-{number}", max_request_bytes=64 * 1024 * 1024) as client:
        figures["long_prompt"] = await time_long_prompt(client, QUICK_PROMPT_TOKENS if plan.quick else PROMPT_TOKENS)
    note(", ".join(f"{n} streams: {one['cpu_us_per_token']:.1f} us" for n, one in figures["streams"].items()))
    return figures


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    with EmbeddedRedis() as redis:
        figures = median_of([asyncio.run(measure_round(redis.url, number, plan)) for number in range(plan.rounds)])
    idle, prompt = figures["idle_waiters"], figures["long_prompt"]
    rows = [
        *((f"{n} streams, us of CPU per token", one["cpu_us_per_token"]) for n, one in figures["streams"].items()),
        (f"{idle['waiters']} idle waiters, % of a core, first {FIRST_S:.0f} s", idle["core_percent_first"]),
        (f"{idle['waiters']} idle waiters, % of a core, later", idle["core_percent_later"]),
        (f"prompt of {prompt['prompt_tokens']} tokens, ms in which the loop stands still", prompt["loop_blocked_ms"]),
    ]
    show("cost of a client", ("", ""), rows)
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        asyncio.run(write_tokens(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
    else:
        run(measure)
