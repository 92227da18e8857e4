"""The HTTP server in the event loop of a test, and requests that are written byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from llamaq.gateway import uvicorn_server
from llamaq.gateway.settings import serve_settings
from llamaq.gateway.uvicorn_server import ClientConnection, bind, build_server, url_of

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving_http(redis_url: str, queue: str, **settings: Any) -> AsyncIterator[str]:
    """Run the server of `llamaq serve`, and yield its URL. A busy machine may take long to answer the last requests."""
    chosen = serve_settings(redis_url=redis_url, queue=queue, http_port=0, **{"shutdown_s": 1, **settings})
    with bind(chosen) as bound:
        with mock.patch.object(uvicorn_server, "ANSWER_TIME_S", 20):
            server = build_server(chosen)
        serving = asyncio.create_task(server.serve([bound]))
        try:
            yield url_of(chosen, bound)
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def sending(url: str, data: bytes) -> AsyncIterator[Connection]:
    """Open a connection, send bytes, and close the connection at the end."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def watch_received(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Awaitable[None]]:
    """Return a function that waits until the server has received these bytes at once."""
    received: list[bytes] = []
    receive = ClientConnection.data_received

    def record(self: ClientConnection, data: bytes) -> None:
        receive(self, data)
        received.append(data)

    async def until_received(data: bytes) -> None:
        while data not in received:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.01)

    monkeypatch.setattr(ClientConnection, "data_received", record)
    return until_received


def post_of(path: str, body: object, **headers: str) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    encoded = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: llamaq", f"Content-Length: {len(encoded)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + encoded
