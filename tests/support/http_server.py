"""The HTTP server in the event loop of a test, and requests that are written byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from llamaq.gateway.server import bind, build_server, url_of
from llamaq.gateway.settings import serve_settings

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving_http(redis_url: str, queue: str, **settings: Any) -> AsyncIterator[str]:
    """Run the server of `llamaq serve`, and yield its URL."""
    chosen = serve_settings(redis_url=redis_url, queue=queue, http_port=0, **{"shutdown_s": 1, **settings})
    with bind(chosen) as bound:
        server = build_server(chosen)
        serving = asyncio.create_task(server.serve([bound]))
        try:
            yield url_of(chosen, bound)
        finally:
            server.should_exit = True
            await serving


async def send_raw(url: str, data: bytes) -> Connection:
    """Open a connection and send bytes."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def post_raw(url: str, path: str, body: bytes) -> Connection:
    """Send a POST request, and leave the response to the caller."""
    head = f"POST {path} HTTP/1.1\r\nHost: llamaq\r\nContent-Length: {len(body)}\r\n\r\n"
    return await send_raw(url, head.encode() + body)
