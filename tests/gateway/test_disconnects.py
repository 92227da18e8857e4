"""A client that disconnects ends its jobs, whatever they are doing; a kept job continues."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

import httpx
import pytest
from tests.support.http_server import post_of, sending, serving_http, watch_received

from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.responses.record import ID_PREFIX
from llamaq.gateway.settings import serve_settings
from llamaq.gateway.uvicorn_server import DEAD_CLIENT, bind
from llamaq.producer import AsyncClient, FinishReason
from llamaq.producer.testing import FakeAttempt, FakeWorker

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
STREAMED = {"messages": MESSAGES, "stream": True}


@asynccontextmanager
async def gateway(redis_url: str, queue: str, **settings: float) -> AsyncIterator[tuple[str, FakeWorker, AsyncClient]]:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue, **settings) as url,
    ):
        await worker.announce()
        yield url, worker, client


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds. The test's time limit ends the wait."""
    while not await condition():  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.01)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """A garbage collection would also close a stream, but at an unknown time."""
    gc.disable()
    yield
    gc.enable()


async def emit_until_cancelled(attempt: FakeAttempt) -> None:
    while (await attempt.emit([1], "word ")).code != "cancel":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await attempt.finish(FinishReason.CANCELLED)


@pytest.mark.parametrize(
    "body",
    [
        STREAMED,
        {"messages": MESSAGES},
        {"messages": MESSAGES, "store": True},
        {**STREAMED, "n": 3},
        {**STREAMED, "store": True},  # its client has no id yet
        {**STREAMED, "return_token_ids": True},  # no worker says what the tokens of the prompt are
    ],
)
async def test_waiting_jobs_are_cancelled_at_once(
    redis_url: str, queue: str, body: dict[str, object], no_garbage_collection: None
) -> None:
    async with gateway(redis_url, queue) as (url, _, client), sending(url, post_of(CHAT, body)) as (_, writer):
        n_jobs = body.get("n", 1)

        async def are_submitted() -> bool:
            return (await client.queue_depth()).waiting == n_jobs

        await until(are_submitted)
        job_ids = [job.job_id for job in await client.jobs()]
        writer.transport.abort()
        for job_id in job_ids:
            assert (await client.job(job_id).result(timeout=60)).finish_reason is FinishReason.CANCELLED


async def test_an_answer_without_an_id_is_not_kept_for_nobody(redis_url: str, queue: str) -> None:
    body = {"prompt": "hi", "stream": True, "store": True}
    async with gateway(redis_url, queue) as (url, worker, client):
        async with sending(url, post_of("/completion", body)) as (reader, writer):
            attempt = await worker.start_next()
            await attempt.emit([1], "word ")
            await reader.readuntil(b"word")
            writer.transport.abort()
        await emit_until_cancelled(attempt)
        assert (await client.job(attempt.claim.job_id).result()).finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("n", [1, 2])
async def test_a_running_stream_is_cancelled(redis_url: str, queue: str, n: int) -> None:
    async with (
        gateway(redis_url, queue) as (url, worker, _),
        sending(url, post_of(CHAT, {**STREAMED, "n": n})) as (reader, writer),
    ):
        attempts = [await worker.start_next() for _ in range(n)]
        running = [asyncio.create_task(emit_until_cancelled(attempt)) for attempt in attempts]
        await reader.readuntil(b"word")
        writer.transport.abort()
        await asyncio.gather(*running)


async def test_a_running_job_without_a_stream_is_cancelled_also_when_its_client_closes_one_direction(
    redis_url: str, queue: str
) -> None:
    async with (
        gateway(redis_url, queue) as (url, worker, client),
        sending(url, post_of(CHAT, {"messages": MESSAGES})) as (_, writer),
    ):
        attempt = await worker.start_next()
        writer.write_eof()

        async def is_cancelled() -> bool:
            return (await client.job(attempt.claim.job_id).status()).cancel_requested

        await until(is_cancelled)
        await attempt.finish(FinishReason.CANCELLED)


async def test_a_client_that_does_not_read_is_gone_after_some_time(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEAD_CLIENT, "TCP_USER_TIMEOUT", DEAD_CLIENT["TCP_USER_TIMEOUT"] // 100)
    async with (
        gateway(redis_url, queue) as (url, worker, client),
        sending(url, post_of(CHAT, STREAMED)),
    ):
        attempt = await worker.start_next()
        while (await attempt.emit([1], "word " * 50_000)).code != "cancel":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await attempt.finish(FinishReason.CANCELLED)
        assert (await client.job(attempt.claim.job_id).result()).finish_reason is FinishReason.CANCELLED


async def test_a_client_that_has_sent_more_than_its_request_is_noticed_when_it_leaves(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_received = watch_received(monkeypatch)
    async with (
        gateway(redis_url, queue) as (url, _, client),
        sending(url, post_of(CHAT, {"messages": MESSAGES})) as (_, writer),
    ):

        async def is_submitted() -> bool:
            return (await client.queue_depth()).waiting == 1

        await until(is_submitted)
        (job,) = await client.jobs()
        writer.write(b"\r\n")  # the beginning of a next request
        await until_received(b"\r\n")
        writer.transport.abort()
        assert (await client.job(job.job_id).result(timeout=60)).finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("kept", [{"store": True}, {"Idempotency_Key": "k"}])
async def test_a_kept_job_outlives_its_client(redis_url: str, queue: str, kept: dict[str, object]) -> None:
    body = {**STREAMED, **kept}
    headers = {"Idempotency_Key": "k"} if "Idempotency_Key" in kept else {}
    async with gateway(redis_url, queue) as (url, worker, client):
        async with sending(url, post_of(CHAT, body, **headers)) as (reader, writer):
            attempt = await worker.start_next()
            await attempt.emit([1], "word ")
            await reader.readuntil(b"word")
            writer.transport.abort()
        # The server handles the disconnect before a later connection.
        async with sending(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _):
            await reader.readuntil(b"ok")
        assert not (await client.job(attempt.claim.job_id).status()).cancel_requested
        await attempt.finish(text="end", tokens=[2])
        assert (await client.job(attempt.claim.job_id).result()).text == "word end"


async def test_a_server_that_stops_cancels_the_jobs_of_its_open_requests(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        AsyncExitStack() as open_,
    ):
        await worker.announce()
        async with serving_http(redis_url, queue, shutdown_s=0.0) as url:
            reader, _ = await open_.enter_async_context(sending(url, post_of(CHAT, STREAMED)))
            attempt = await worker.start_next()
            await attempt.emit([1], "word ")
            await reader.readuntil(b"word")
        assert (await client.job(attempt.claim.job_id).status()).cancel_requested
        await attempt.finish(FinishReason.CANCELLED)


async def test_a_response_whose_client_was_gone_before_it_was_stored_is_stored_by_the_repeated_request(
    redis_url: str, queue: str
) -> None:
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def create() -> str:
            body = {"input": "hi", "background": True}
            response = await http.post("/v1/responses", json=body, headers={"Idempotency-Key": queue})
            return str(response.json()["id"])

        response_id = await create()
        await client.redis.delete(HttpKeys(client.keys.prefix).http_response(response_id.removeprefix(ID_PREFIX)))
        assert (await http.get(f"/v1/responses/{response_id}")).status_code == HTTPStatus.NOT_FOUND
        assert await create() == response_id
        assert (await http.get(f"/v1/responses/{response_id}")).status_code == HTTPStatus.OK


def test_the_system_looks_for_clients_that_have_gone_without_a_word() -> None:
    with (
        bind(serve_settings(http_port=0)) as bound,
        socket.create_connection(bound.getsockname()),
        bound.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, interval_s, n_probes = (
            accepted.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + n_probes * interval_s == 60
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
