"""A job finishes while readers are in the middle of its stream: its events are deleted, and no reader loses output."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from llamaq.common.protocol import codec
from llamaq.producer import AsyncClient, AsyncJob, Chunk, JobFailed
from llamaq.producer.streaming.event_reader import PAGE_EVENTS, EventReader, StoredJob
from llamaq.producer.testing import FakeAttempt, FakeWorker


async def begin(client: AsyncClient, worker: FakeWorker, n_tokens: int) -> tuple[AsyncJob, FakeAttempt]:
    """Submit a job, and store this number of tokens, each in its own event. The text of token 7 is `7 `."""
    job = await client.submit("x")
    attempt = await worker.start_next()
    for number in range(n_tokens):
        await attempt.emit([number], f"{number} ")
    return client.job(job.id), attempt


def check_whole(chunks: list[Chunk], attempt: FakeAttempt) -> None:
    assert [token for chunk in chunks for token in chunk.tokens] == attempt.tokens
    assert "".join(chunk.text for chunk in chunks) == attempt.text


async def read_into(chunks: list[Chunk], stream: AsyncIterator[Chunk]) -> None:
    async for chunk in stream:
        chunks.append(chunk)  # noqa: PERF401  # the chunks before an error count


async def test_a_job_may_finish_between_two_pages_of_a_late_reader(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await begin(client, worker, PAGE_EVENTS + 5)
        stream = job.stream(timeout=60)
        chunks = [await anext(stream)]
        await attempt.finish(tokens=[9999], text="withheld")
        assert not await client.redis.exists(client.keys.of_job(job.id).events)
        chunks += [chunk async for chunk in stream]
        check_whole(chunks, attempt)


async def test_a_job_may_finish_while_a_reader_reads_a_page(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await begin(client, worker, 3)
        fetch = EventReader._fetch_page

        async def fetch_around_the_end(reader: EventReader) -> StoredJob:
            """The job finishes after its hash was read and before its events are read."""
            monkeypatch.setattr(EventReader, "_fetch_page", fetch)
            before = await fetch(reader)
            await attempt.finish(tokens=[3], text="3 ")
            entries: Any = await client.redis.xrange(reader.keys.events)
            assert entries == []
            return replace(before, entries=entries)

        monkeypatch.setattr(EventReader, "_fetch_page", fetch_around_the_end)
        chunks = [chunk async for chunk in job.stream(timeout=60)]
        assert attempt.tokens == [0, 1, 2, 3]
        check_whole(chunks, attempt)


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_text_without_a_token_at_the_end_reaches_every_reader(
    redis_url: str, queue: str, is_delivered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await begin(client, worker, 2)
        stream = job.stream(timeout=60)
        chunks = [await anext(stream)]
        if not is_delivered:
            deliver = EventReader.deliver

            def lose_tokens(reader: EventReader, payload: bytes) -> None:
                if not codec.is_tokens_event(payload):
                    deliver(reader, payload)

            monkeypatch.setattr(EventReader, "deliver", lose_tokens)
        await attempt.finish(text="withheld")
        chunks += [chunk async for chunk in stream]
        check_whole(chunks, attempt)


async def test_readers_of_a_failed_job_get_its_output_before_the_error(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await begin(client, worker, 3)

        early, late = job.stream(timeout=60), client.job(job.id).stream(timeout=60)
        chunks = [await anext(early)]
        await attempt.emit([3], "3 ")
        assert await attempt.fail()
        for stream, read in ((early, chunks), (late, [])):
            with pytest.raises(JobFailed, match="broken"):
                await read_into(read, stream)
            check_whole(read, attempt)
