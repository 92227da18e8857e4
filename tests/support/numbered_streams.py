"""Streams of a fake worker whose token N is the number N, and the check that a reader gets each of them once."""

from __future__ import annotations

import asyncio
from typing import Any

from llamaq.producer import AsyncClient, AsyncJob, Chunk
from llamaq.producer.testing import FakeAttempt, FakeWorker


async def read_all(job: AsyncJob, **options: Any) -> list[Chunk]:
    return [chunk async for chunk in job.stream(**options)]


def check_output(chunks: list[Chunk], n_tokens: int) -> None:
    """Check that the chunks have the tokens 0, 1, 2, … and that the text of each token is its number and a space."""
    assert [token for chunk in chunks for token in chunk.tokens] == list(range(n_tokens))
    assert "".join(chunk.text for chunk in chunks) == "".join(f"{number} " for number in range(n_tokens))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.offset for chunk in chunks] == [chunk.tokens[0] for chunk in chunks if chunk.tokens]


async def emit(attempt: FakeAttempt, count: int) -> None:
    for _ in range(count):
        number = attempt.stored
        assert (await attempt.emit([number], f"{number} ")).code == "ok"


async def submit_and_start(client: AsyncClient, worker: FakeWorker) -> tuple[AsyncJob, FakeAttempt]:
    job = await client.submit("x")
    return job, await worker.start_next()


async def until_confirmed(client: AsyncClient, channels: int = 1) -> None:
    while client.subscriber.n_confirmed < channels:  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.005)
