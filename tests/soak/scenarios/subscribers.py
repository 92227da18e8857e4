"""Many subscribers read a few jobs. They join at any time, leave, return and lose connections, but miss no token."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing

from tests.soak.chaos import VOCABULARY, JobShape, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.load import collect, read, run_with_background, submit
from tests.soak.report import Outcome, ProgressReport

from llamaq.common.protocol.job_events import Tokens
from llamaq.producer import AsyncClient, AsyncJob

N_CLIENTS = 10
"""Number of clients. Each has one pub/sub connection, which its subscribers share."""
TICK_S = 0.03
LATE_S = 2.0
"""Subscribers join until this many seconds after the expected last token."""
SHARE_RETURNING = 0.2
"""Share of the subscribers that leave before the end and return."""
KILL_EVERY_S = (0.2, 0.8)


async def subscribers(
    seed: int, report: ProgressReport, *, n_subscribers: int = 1000, n_jobs: int = 20, n_tokens: int = 150
) -> Outcome:
    """Let each of `n_subscribers` read a whole stream. Before, some of them read only a part of it, and leave."""
    checker, rng, started_s = Checker(), seeded_random(seed, "subscribers"), time.monotonic()
    cut: list[int] = []
    async with Environment(settings={"n_parallel": n_jobs, "n_ctx": 8192}) as environment:
        environment.use_random_model()
        await environment.start_ready(1, {"tick_s": TICK_S})
        clients = [environment.client() for _ in range(N_CLIENTS)]
        async with environment.client() as direct:
            jobs = [await _submit(direct, checker, rng, n_tokens) for _ in range(n_jobs)]
            n_done = 0

            async def one(number: int) -> None:
                nonlocal n_done
                await _subscribe(clients[number % N_CLIENTS].job(rng.choice(jobs).id), checker, rng, number, n_tokens)
                n_done += 1
                report(n_done, n_subscribers, "subscribers have read to the end")

            async def all_subscribers() -> None:
                await asyncio.gather(*(one(number) for number in range(n_subscribers)))

            await run_with_background(_kill_connections(direct, rng, cut), all_subscribers())
            await collect(direct, checker)
        for client in clients:
            await client.aclose()
    figures = {"subscribers": n_subscribers, "jobs": n_jobs, "connections": N_CLIENTS, "connections killed": sum(cut)}
    return Outcome("subscribers", checker.judge(), figures, time.monotonic() - started_s)


async def _submit(client: AsyncClient, checker: Checker, rng: random.Random, n_tokens: int) -> AsyncJob:
    tokens = rng.choices(VOCABULARY, k=20)
    options = {"tokens": tokens, "max_tokens": n_tokens, "ignore_eos": True, "seed": 1}
    return await submit(client, checker, JobShape(options, demands={"n_tokens": n_tokens, "ending": "length"}))


async def _subscribe(job: AsyncJob, checker: Checker, rng: random.Random, number: int, n_tokens: int) -> None:
    await asyncio.sleep(rng.uniform(0, n_tokens * TICK_S + LATE_S))
    if rng.random() < SHARE_RETURNING:
        await _read_some(job, checker, f"subscriber {number}, first part", rng.randint(1, n_tokens // 2))
        await asyncio.sleep(rng.uniform(0, LATE_S))
    await read(job, checker, f"subscriber {number}")


async def _read_some(job: AsyncJob, checker: Checker, reader: str, n_chunks: int) -> None:
    """Read the first chunks of a stream, then close it."""
    checker.record_start(reader, job.id, is_whole=False)
    n_chars = 0
    async with aclosing(job.stream()) as chunks:
        async for chunk in chunks:
            event = Tokens(offset=chunk.offset, tokens=chunk.tokens, text_offset=n_chars, text=chunk.text)
            checker.record_event(reader, job.id, event)
            n_chars += len(chunk.text)
            if chunk.index >= n_chunks:
                return


async def _kill_connections(client: AsyncClient, rng: random.Random, cut: list[int]) -> None:
    """At random intervals, kill a third of the pub/sub connections."""
    while True:
        await asyncio.sleep(rng.uniform(*KILL_EVERY_S))
        connections = await client.redis.client_list(_type="pubsub")
        some = rng.sample(connections, k=len(connections) // 3)
        cut += [await client.redis.client_kill_filter(_id=connection["id"]) for connection in some]
