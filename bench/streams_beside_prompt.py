"""Streams that run while one long prompt is computed: the load, and the gaps of the streams in this time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Self

from http_streams import connected
from job_timings import Timeline
from llamaq.producer import AsyncClient
from workload import Prompts, follow, greedy

N_IN = 64
"""Prompt tokens of each stream."""
STREAMED_BEFORE = 24
"""Number of arrivals of every stream before the long prompt is submitted."""

Gap = tuple[float, float]
"""Times of two successive arrivals, in seconds."""
Send = Callable[[list[int], int, Callable[[], object]], Awaitable[Timeline]]
"""Generates a number of tokens after a prompt, and calls the function at each arrival."""


@dataclass(frozen=True, slots=True)
class Load:
    """The prompts that one system gets in one round."""

    streams: list[list[int]]
    long_prompt: list[int]
    n_out: int
    """Output tokens of each stream. They must last until the long prompt is computed."""

    @classmethod
    def draw(cls, prompts: Prompts, n_streams: int, n_long: int, n_out: int) -> Self:
        return cls(prompts.several(n_streams, N_IN), prompts.tokens(n_long), n_out)


@dataclass(frozen=True, slots=True)
class Timelines:
    """What the subscribers saw."""

    long: Timeline
    streams: Sequence[Timeline]

    @property
    def gaps(self) -> list[Gap]:
        """Those gaps of all streams that overlap the time from the long prompt's submit to its first token."""
        begin_s, end_s = self.long.submitted_s, self.long.arrivals_s[0]
        pairs = (pair for stream in self.streams for pair in pairwise(stream.arrivals_s))
        return [(before, after) for before, after in pairs if after > begin_s and before < end_s]

    @property
    def n_ended_early(self) -> int:
        """Number of streams that had no token left when the first token of the long prompt arrived."""
        return sum(stream.ended_s <= self.long.arrivals_s[0] for stream in self.streams)


async def _run(load: Load, send: Send) -> Timelines:
    """Start the streams, send the long prompt when all of them have begun, and return the timelines."""
    counts = [0] * len(load.streams)
    all_stream = asyncio.Event()

    def count(index: int, arrived: int = 1) -> None:
        counts[index] += arrived
        if min(counts) >= STREAMED_BEFORE:
            all_stream.set()

    async def stream(index: int, prompt: list[int]) -> Timeline:
        timeline = await send(prompt, load.n_out, partial(count, index))
        count(index, STREAMED_BEFORE)  # on a busy machine, all its tokens may have arrived in a few chunks
        return timeline

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(index, prompt)) for index, prompt in enumerate(load.streams)]
        await all_stream.wait()
        long = await send(load.long_prompt, 1, lambda: None)
    return Timelines(long, [task.result() for task in running])


async def run_on_worker(load: Load, client: AsyncClient) -> Timelines:
    """Run the load as jobs of a queue."""

    async def send(prompt: list[int], n_out: int, on_arrival: Callable[[], object]) -> Timeline:
        return await follow(client, prompt, lambda _: on_arrival(), **greedy(n_out))

    return await _run(load, send)


async def run_over_http(load: Load, url: str) -> Timelines:
    """Run the load as requests to the server at this address. All connections are open before the first request."""
    async with connected(url, len(load.streams) + 1) as connections:
        idle = iter(connections)

        async def send(prompt: list[int], n_out: int, on_arrival: Callable[[], object]) -> Timeline:
            return await next(idle).complete(prompt, n_out, on_arrival)

        return await _run(load, send)
