"""Streams of `/v1/completions`, read over HTTP with as little work as possible: the server shall be measured.

The same requests go to `llamaq serve` and to llama-server. Each of a set of connections stays open for many requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from job_timings import Timeline
from llamaq.common.errors import LlamaqError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LAST_EVENT = b"data: [DONE]"
TEXT = b'"text":'
"""Every event with text contains it, and no header does."""
N_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


def _ignore() -> None:
    """Do nothing at an arrival."""


class StreamConnection(asyncio.Protocol):
    """A connection that reads one answer after the other."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._timeline = Timeline(0.0)
        self._on_arrival: Callable[[], object] = _ignore
        self._begun: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Note the time of an arrival with text, and look for the end of the answer."""
        self._received += data
        if TEXT in data:
            self._timeline.arrivals_s.append(time.perf_counter())
            self._timeline.counts.append(0)
            self._on_arrival()
            if self._begun is not None and not self._begun.done():
                self._begun.set_result(None)
        if self._ended is not None and not self._ended.done() and LAST_EVENT in self._received[-len(data) - 64 :]:
            self._timeline.ended_s = time.perf_counter()
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waits for the answer."""
        for waiting in (self._begun, self._ended):
            if waiting is not None and not waiting.done():
                waiting.set_exception(exc or ConnectionError("the server closed the connection"))
                waiting.exception()  # marks the error as retrieved, because nothing awaits it after the benchmark

    async def begin(self, prompt: list[int], n_out: int) -> Timeline:
        """Send a request and return when the first text of its answer is there."""
        if self._transport is None:
            raise RuntimeError("the connection is not open")
        request = _request(prompt, n_out)
        self._received.clear()
        self._begun, self._ended = (asyncio.get_running_loop().create_future() for _ in range(2))
        self._timeline = Timeline(time.perf_counter())
        self._transport.write(request)
        await self._begun
        return self._timeline

    async def end(self) -> None:
        """Return when the whole answer is there."""
        if self._ended is not None:
            await self._ended

    async def complete(self, prompt: list[int], n_out: int, on_arrival: Callable[[], object] = _ignore) -> Timeline:
        """Send a request and read its answer of `n_out` tokens to the end. `on_arrival` is called at each arrival."""
        self._on_arrival = on_arrival
        timeline = await self.begin(prompt, n_out)
        await self.end()
        found = N_TOKENS.findall(bytes(self._received))
        if not found or int(found[-1]) != n_out or not timeline.arrivals_s:
            raise LlamaqError(f"not an answer of {n_out} tokens: {bytes(self._received[:1000])!r}")
        timeline.counts[-1] = n_out  # the server does not say which tokens came with which arrival
        return timeline


def _request(prompt: list[int], n_out: int) -> bytes:
    options: dict[str, Any] = {"temperature": 0.0, "top_k": 1, "ignore_eos": True, "max_tokens": n_out}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": prompt, **options, **stream}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: bench",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


@asynccontextmanager
async def connected(url: str, count: int) -> AsyncIterator[list[StreamConnection]]:
    """Open connections to a server, and close them at the end."""
    address, loop = urlsplit(url), asyncio.get_running_loop()
    opened = [
        await loop.create_connection(StreamConnection, address.hostname or "", address.port or 80) for _ in range(count)
    ]
    try:
        yield [protocol for _, protocol in opened]
    finally:
        for transport, _ in opened:
            transport.close()


async def complete_all(url: str, prompts: Sequence[list[int]], n_out: int) -> list[Timeline]:
    """Send all prompts at once, each over a connection that is open before, and return when all answers have ended."""
    async with connected(url, len(prompts)) as connections:
        pairs = zip(connections, prompts, strict=True)
        return list(await asyncio.gather(*(each.complete(prompt, n_out) for each, prompt in pairs)))
