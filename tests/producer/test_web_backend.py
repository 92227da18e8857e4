"""The web backend of the README, served by uvicorn: readers that leave cancel their jobs, and errors have a status."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from tests.support.readme import block

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import AsyncClient, Client, FinishReason
from llamaq.producer.testing import FakeAttempt, FakeWorker, serving

N_READERS = 50
N_LEAVING = 32

Reader = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def backend(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the README's examples define: `app` and `client`."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    monkeypatch.setenv("LLAMAQ_MAX_REQUEST_BYTES", "1024")
    namespace: dict[str, Any] = {}
    for name in ("backend", "errors"):
        exec(compile(block(name), f"README.md, {name}", "exec"), namespace)
    return namespace


@asynccontextmanager
async def serving_http(backend: dict[str, Any]) -> AsyncIterator[int]:
    """Serve the app and yield its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=N_READERS) as listening:
        config = uvicorn.Config(backend["app"], log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task
            await backend["client"].aclose()


async def post(port: int, path: str) -> Reader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: llamaq\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def read_response(reader: Reader) -> str:
    text = (await reader[0].read()).decode()
    reader[1].close()
    return text


async def generate_until(released: asyncio.Event, attempt: FakeAttempt) -> FinishReason:
    """Generate one token after the other, until the job is cancelled or the event is set."""
    reason = FinishReason.STOP
    while not released.is_set():
        if (await attempt.emit([1], "word ")).code == "cancel":
            reason = FinishReason.CANCELLED
            break
        await asyncio.sleep(0.02)
    await attempt.finish(reason)
    return reason


async def test_readers_that_leave_cancel_their_jobs_and_the_others_read_to_the_end(
    backend: dict[str, Any], redis_url: str, queue: str
) -> None:
    released = asyncio.Event()
    async with FakeWorker(redis_url, queue) as worker, serving_http(backend) as port:
        await worker.announce()
        readers = [await post(port, f"/answer?prompt={number}") for number in range(N_READERS)]
        attempts = [await worker.start_next() for _ in range(N_READERS)]
        running = [asyncio.create_task(generate_until(released, attempt)) for attempt in attempts]
        for reader, _ in readers:
            await reader.readuntil(b"word")
        for _, writer in readers[:N_LEAVING]:
            writer.transport.abort()
        leaving = [
            task
            for task, attempt in zip(running, attempts, strict=True)
            if int(attempt.request.prompt or 0) < N_LEAVING
        ]
        reasons = await asyncio.gather(*leaving)
        released.set()
        await asyncio.gather(*running)
        assert reasons == [FinishReason.CANCELLED] * N_LEAVING
        assert [task.result() for task in running].count(FinishReason.STOP) == N_READERS - N_LEAVING
        for staying in readers[N_LEAVING:]:
            assert "word" in await read_response(staying)


async def test_a_reader_that_leaves_before_the_first_token_cancels_its_waiting_job(
    backend: dict[str, Any], redis_url: str, queue: str
) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(backend) as port,
    ):
        await worker.announce()
        readers = [await post(port, "/answer?prompt=x") for _ in range(4)]
        while (await client.queue_depth()).waiting < len(readers):  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.01)
        for _, writer in readers:
            writer.transport.abort()
        while (await client.queue_depth()).waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_errors_of_the_submit_have_a_status(backend: dict[str, Any], redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(backend) as port,
    ):
        without_worker = await read_response(await post(port, "/answer?prompt=x"))
        await worker.announce()
        refused = await read_response(await post(port, "/answer?prompt=" + "x" * 2000))
        missing = await read_response(await post(port, "/answer"))
        await client.redis.hset(client.keys.config(queue, 0), "max_queue", "1")
        await client.submit("x")
        full = await read_response(await post(port, "/answer?prompt=x"))
    assert without_worker.startswith("HTTP/1.1 503 ")
    assert without_worker.endswith("\r\n\r\nNoWorker")
    assert refused.startswith("HTTP/1.1 400 ")
    assert refused.endswith("\r\n\r\nInvalidRequest")
    assert missing.startswith("HTTP/1.1 422 ")
    assert full.startswith("HTTP/1.1 503 ")
    assert "\r\nretry-after: 1\r\n" in full
    assert full.endswith("\r\n\r\nQueueFull")


@pytest.mark.parametrize(
    ("code", "status"), [("prompt_too_long", 400), ("chat_template", 400), ("invalid_grammar", 400), ("internal", 502)]
)
async def test_a_job_that_fails_before_its_first_token_has_a_status(
    backend: dict[str, Any], redis_url: str, queue: str, code: str, status: int
) -> None:
    async with FakeWorker(redis_url, queue) as worker, serving_http(backend) as port:
        await worker.announce()
        reader = await post(port, "/answer?prompt=x")
        await (await worker.start_next()).fail(code, "the reason in words")
        response = await read_response(reader)
    assert response.startswith(f"HTTP/1.1 {status} ")
    assert response.endswith(f"\r\n\r\n{code}")


async def test_a_started_stream_yields_all_chunks(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        stream = await client.stream("x")
        answering = asyncio.create_task((await worker.start_next()).answer(["a", "b", "c"]))
        await stream.started()
        await stream.started()
        assert "".join([text async for text in stream.text()]) == "abc"
        await answering
        await stream.started()


async def test_a_reader_that_is_gone_before_the_first_chunk_gets_no_chunks(redis_url: str, queue: str) -> None:
    async def is_gone() -> bool:
        return True

    async with AsyncClient(redis_url, queue) as client:
        stream = await client.stream("x")
        await stream.started(is_gone)
        assert [chunk async for chunk in stream] == []
        assert (await stream.job.result()).finish_reason is FinishReason.CANCELLED


def test_a_blocking_stream_tells_errors_before_its_first_chunk(redis_url: str, queue: str) -> None:
    def answer(request: JobRequest) -> list[str]:
        return ["a", "b"]

    with serving(redis_url, queue, answer), Client(redis_url, queue, require_worker=True) as client:
        stream = client.stream("x")
        stream.started()
        assert "".join(stream.text()) == "ab"
