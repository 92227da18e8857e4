"""A stream yields the progress of its prompt as chunks without text, if the job asks for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.numbered_streams import until_confirmed
from tests.support.prompt_progress import emit_progress

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.producer import AsyncClient, Chunk, Client, IdempotencyConflict
from llamaq.producer.streaming.end_waiter import EndWaiter
from llamaq.producer.streaming.event_reader import EventReader
from llamaq.producer.testing import FakeWorker, serving


def processed(chunks: list[Chunk]) -> list[int]:
    return [chunk.progress.processed_tokens for chunk in chunks if chunk.progress is not None]


async def test_chunks_with_progress_precede_the_text(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        stream = await client.stream("x", prompt_progress=True)
        reading = asyncio.create_task(stream.started())
        attempt = await worker.start_next()
        assert attempt.request.prompt_progress
        await until_confirmed(client)
        await emit_progress(attempt, 5, 30, cached_tokens=5)
        await reading
        await emit_progress(attempt, 30, 30, cached_tokens=5)
        await attempt.answer(["ab"])  # tokens that arrive together would be one chunk
        chunks = [chunk async for chunk in stream]
        assert processed(chunks) == [5, 30]
        assert chunks[0].progress == PromptProgress(total_tokens=30, cached_tokens=5, processed_tokens=5, time_ms=0.0)
        assert [(chunk.text, chunk.tokens, chunk.index, chunk.offset) for chunk in chunks] == [
            ("", (), 0, 0),
            ("", (), 1, 0),
            ("ab", (0,), 2, 0),
        ]


async def test_progress_before_the_first_look_at_a_stream_is_kept(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        for n_before in (0, 1):
            stream = await client.stream("x", prompt_progress=True)
            attempt = await worker.start_next()
            await emit_progress(attempt, 8, 30)
            await emit_progress(attempt, 16, 30)
            await asyncio.sleep(0)
            if n_before:
                await stream.aclose()
                await attempt.finish()
            else:
                await attempt.answer(["a"])
                chunks = [chunk async for chunk in stream]
                assert processed(chunks) == [8, 16]
                assert [chunk.index for chunk in chunks] == [0, 1, 2]
            assert repr(client.subscriber).startswith("<Subscriber channels=0 "), "nothing listens any more"


async def test_nothing_listens_to_a_job_that_was_refused_or_found_by_its_key(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        first = await client.stream("x", prompt_progress=True, idempotency_key="k")
        attempt = await worker.start_next()
        again = await client.stream("x", prompt_progress=True, idempotency_key="k")
        with pytest.raises(IdempotencyConflict):
            await client.stream("y", prompt_progress=True, idempotency_key="k")
        assert again.job.id == first.job.id
        await attempt.answer(["a"])
        for stream in (first, again):
            assert [chunk.text async for chunk in stream] == ["a"]
        assert repr(client.subscriber).startswith("<Subscriber channels=0 ")


async def test_a_reader_that_joins_late_has_all_text_and_no_progress(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", prompt_progress=True)
        attempt = await worker.start_next()
        await emit_progress(attempt, 30, 30)
        await attempt.answer(["a", "b"])
        chunks = [chunk async for chunk in client.job(job.id).stream()]
        assert "".join(chunk.text for chunk in chunks) == "ab"
        assert processed(chunks) == []


async def test_a_flush_that_the_worker_repeats_adds_no_chunk(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", prompt_progress=True)
        attempt = await worker.start_next()
        chunks: list[Chunk] = []

        async def read() -> None:
            chunks.extend([chunk async for chunk in job.stream()])

        reading = asyncio.create_task(read())
        await until_confirmed(client)
        for n_processed in (8, 8, 16, 8):  # the last one: a preempted job begins again
            await emit_progress(attempt, n_processed, 30)
        await attempt.answer(["a"])
        await reading
        assert processed(chunks) == [8, 16, 8]


async def test_progress_that_arrives_while_the_stored_events_are_read_is_not_lost(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", prompt_progress=True)
        attempt = await worker.start_next()
        fetch, delivered = EventReader._fetch_page, asyncio.Event()
        deliver = EventReader.deliver

        async def fetch_slowly(reader: EventReader) -> Any:
            await emit_progress(attempt, 8, 30)
            await delivered.wait()
            return await fetch(reader)

        def note(reader: EventReader, payload: bytes) -> None:
            deliver(reader, payload)
            delivered.set()

        monkeypatch.setattr(EventReader, "_fetch_page", fetch_slowly)
        monkeypatch.setattr(EventReader, "deliver", note)
        stream = job.stream()
        assert processed([await anext(stream)]) == [8]
        monkeypatch.setattr(EventReader, "_fetch_page", fetch)
        await attempt.answer(["a"])
        assert [chunk.text async for chunk in stream] == ["a"]


def test_a_result_is_not_read_again_for_each_chunk_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(EndWaiter, "reread", lambda _: read.append(b""))
    waiter = object.__new__(EndWaiter)
    progress = PromptProgress(total_tokens=30, cached_tokens=0, processed_tokens=8, time_ms=300.5)
    waiter.deliver(codec.encode_event(progress))
    assert not read
    waiter.deliver(b"anything else")
    assert read


def test_the_blocking_client_streams_a_job_that_asks_for_progress(redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, lambda request: [str(request.prompt_progress)]), Client(redis_url, queue) as client:
        assert "".join(client.stream("x", prompt_progress=True).text()) == "True"
        assert client.generate("x").text == "False"
