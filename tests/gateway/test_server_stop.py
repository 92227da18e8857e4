"""A server that stops ends its open requests with an error that lets clients try again."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvicorn
from tests.support.http_server import post_of, sending, serving_http

from llamaq.gateway import uvicorn_server
from llamaq.gateway.http.json_body import decode_object
from llamaq.gateway.settings import serve_settings
from llamaq.gateway.uvicorn_server import bind, build_server, url_of
from llamaq.producer.testing import FakeWorker

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/completion": {"prompt": [1]},
}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("path", BODIES)
async def test_open_requests_end_with_an_error_in_the_form_of_the_api(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    body = {**BODIES[path], "model": queue}
    async with FakeWorker(redis_url, queue) as worker, AsyncExitStack() as open_:
        await worker.announce()
        async with serving_http(redis_url, queue, shutdown_s=0.0) as url:
            waiting, _ = await open_.enter_async_context(sending(url, post_of(path, body)))
            attempts = [await worker.start_next()]
            streaming, _ = await open_.enter_async_context(sending(url, post_of(path, {**body, "stream": True})))
            attempts.append(await worker.start_next())
            await attempts[1].emit([1], "word ")
            await streaming.readuntil(b"word")
        refused, ended = (await waiting.read()).decode(), (await streaming.read()).decode()
    assert refused.startswith("HTTP/1.1 503 ")
    assert "retry-after: 1\r\n" in refused.lower()
    assert "the server is stopping" in refused
    assert "the server is stopping" in ended
    assert ended.endswith("\r\n0\r\n\r\n")
    if path == "/v1/messages":
        assert '"type":"overloaded_error"' in refused
        assert "event: error" in ended
    else:
        assert '"code":"server_stopping"' in refused
        assert '"code":"server_stopping"' in ended
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("shutdown_s", [0.0, 1.0, 29.6])
def test_the_time_to_end_requests_does_not_include_that_of_their_idle_connections(shutdown_s: float) -> None:
    server = build_server(serve_settings(redis_url="redis://localhost", queue="q", shutdown_s=shutdown_s))
    longest_s = server.config.timeout_graceful_shutdown
    assert longest_s is not None
    assert longest_s >= shutdown_s + uvicorn_server.ANSWER_TIME_S + uvicorn_server.LAST_REQUESTS_S


def test_proxies_close_idle_connections_before_the_server_does() -> None:
    server = build_server(serve_settings(redis_url="redis://localhost", queue="q"))
    assert server.config.timeout_keep_alive > 600, "Google's load balancers keep a connection for 600 s"


async def test_requests_that_arrive_while_a_server_begins_to_stop_are_answered(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = serve_settings(redis_url=redis_url, queue=queue, http_port=0)
    stop, uvicorn_stops = asyncio.Event(), uvicorn.Server.shutdown
    async with AsyncExitStack() as open_:
        bound = open_.enter_context(bind(settings))
        url, server = url_of(settings, bound), build_server(settings)
        monkeypatch.setattr(server, "main_loop", stop.wait)  # the server reads nothing between this event and its stop
        serving = asyncio.create_task(server.serve([bound]))
        idle = [await open_.enter_async_context(sending(url, HEALTH)) for _ in range(3)]
        for reader, _ in idle:
            await reader.readuntil(b"ok")
            await reader.readuntil(b"}")

        async def stop_with_an_unread_request(*args: Any) -> None:
            idle[1][1].write(HEALTH)
            await uvicorn_stops(*args)

        monkeypatch.setattr(uvicorn.Server, "shutdown", stop_with_an_unread_request)
        stop.set()
        idle[0][1].write(HEALTH)
        new = [open_.enter_context(socket.create_connection(bound.getsockname())) for _ in range(2)]
        new[0].sendall(HEALTH)
        await serving
        answers = [await reader.read() for reader, _ in idle] + [_read_all(connection) for connection in new]
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 2 + [b"", b"HTTP/1.1 200 OK", b""]
    assert [b"connection: close\r\n" in answer.lower() for answer in answers] == [True, True, False, True, False]


def _read_all(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


async def test_the_connection_of_a_stream_is_not_closed_without_an_announcement(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = serve_settings(redis_url=redis_url, queue=queue, http_port=0)
    body, stopping, uvicorn_stops = {"prompt": [1], "model": queue}, asyncio.Event(), uvicorn.Server.shutdown

    async def tell_and_stop(*args: Any) -> None:
        stopping.set()
        await uvicorn_stops(*args)

    monkeypatch.setattr(uvicorn.Server, "shutdown", tell_and_stop)
    async with FakeWorker(redis_url, queue) as worker, AsyncExitStack() as open_:
        await worker.announce()
        bound = open_.enter_context(bind(settings))
        url, server = url_of(settings, bound), build_server(settings)
        serving = asyncio.create_task(server.serve([bound]))
        waiting, _ = await open_.enter_async_context(sending(url, post_of("/completion", body)))
        attempts = [await worker.start_next()]
        posted = post_of("/completion", {**body, "stream": True})
        stream, to_server = await open_.enter_async_context(sending(url, posted))
        attempts.append(await worker.start_next())
        await attempts[1].emit([1], "word ")
        assert b"connection: close" not in (await stream.readuntil(b"word")).lower()
        server.server_state.default_headers = [*server.server_state.default_headers]  # uvicorn does so every second
        server.should_exit = True
        await stopping.wait()
        for attempt in attempts:
            await attempt.finish()
        await stream.readuntil(b"\r\n0\r\n\r\n")
        to_server.write(HEALTH)
        await serving
        answers = [await waiting.read(), await stream.read()]
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 2
    assert all(b"connection: close\r\n" in answer.lower() for answer in answers)


async def test_an_upload_that_is_not_complete_ends_too(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    async with AsyncExitStack() as open_:
        async with serving_http(redis_url, queue, shutdown_s=0.0) as url:
            for begun in (head, b"POST /completion HTTP/1.1\r\nHost: x\r\n"):
                reader, _ = await open_.enter_async_context(sending(url, begun + b"Content-Length: 99\r\n\r\n--b"))
            async with sending(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as (other, _):
                await other.readuntil(b"ok")
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_large_bodies_start_few_garbage_collections(redis_url: str, queue: str) -> None:
    settings = serve_settings(redis_url=redis_url, queue=queue, http_port=0)
    threshold, n_collections = gc.get_threshold()[0], gc.get_stats()[0]["collections"]
    n_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with bind(settings) as bound:
            server = build_server(settings)
            server.should_exit = True
            server.run([bound])
        decode_object(b'{"input": [' + b", ".join([b"[]"] * 100_000) + b"]}")
    finally:
        gc.set_threshold(threshold)
        resource.setrlimit(resource.RLIMIT_NOFILE, n_files)
    assert gc.get_stats()[0]["collections"] - n_collections < 100


async def test_a_server_that_is_told_to_stop_exits_with_0(redis_url: str, queue: str) -> None:
    options = ("--redis-url", redis_url, "--queue", queue, "--http-port", "0", "--shutdown-s", "0")
    command = (sys.executable, "-c", "from llamaq.cli.main import main; main()", "serve", *options)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    await process.stderr.readuntil(b"startup complete")
    process.send_signal(signal.SIGTERM)
    log = await process.stderr.read()
    assert (await process.wait(), b"Traceback" in log) == (0, False)
