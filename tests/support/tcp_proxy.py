"""A TCP proxy in front of a Redis, for tests and the soak. Its methods cut, silence or redirect connections.

    with Proxy(server.url) as proxy:
        client = Client(proxy.url)
        ...
        proxy.cut()             # resets every open connection
        proxy.silence()         # every open connection stays open, but transfers no more data
        proxy.refuse()          # refuses new connections until `accept()`; open connections stay
        proxy.redirect_to(url)  # new connections go to another server

All methods may be called from any thread. A method returns when its effect is complete.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from tests.support.ports import HOST, reserve_port

T = TypeVar("T")

CHUNK_BYTES = 64 * 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing the socket sends RST, like a restarted host or a firewall."""


class Proxy:
    """Listens on a port of 127.0.0.1 and forwards all data to one server."""

    def __init__(self, url: str, *, port: int | None = None) -> None:
        """Create a proxy to the server at `url`, `redis://host:port/0` or `unix:///path`. None: a reserved port."""
        self._target = urlsplit(url)
        self._port = reserve_port() if port is None else port
        self._loop = asyncio.new_event_loop()
        self._pairs: dict[_ProxiedConnection, asyncio.Task[object] | None] = {}
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.n_cut = 0
        """Number of connections that `cut` has reset."""
        self.n_silenced = 0
        """Number of connections that `silence` has silenced."""

    def __repr__(self) -> str:
        return f"<Proxy {self.url} connections={len(self._pairs)} cut={self.n_cut} silenced={self.n_silenced}>"

    @property
    def url(self) -> str:
        """The URL of this proxy for clients."""
        return f"redis://{HOST}:{self._port}/0"

    @property
    def n_connections(self) -> int:
        """Number of open connections, silent ones included."""
        return len(self._pairs)

    def cut(self) -> int:
        """Reset all open connections, and return their number."""
        n_cut = self._run(self._cut)
        self.n_cut += n_cut
        return n_cut

    def silence(self) -> int:
        """Stop the transfer on all open connections without closing them, and return their number."""
        n_silenced = self._run(self._silence)
        self.n_silenced += n_silenced
        return n_silenced

    def refuse(self) -> None:
        """Refuse new connections."""
        self._await(self._close_port())

    def accept(self) -> None:
        """Accept new connections again."""
        self._await(self._open_port())

    def redirect_to(self, url: str) -> None:
        """Forward new connections to the server at `url`."""
        self._target = urlsplit(url)

    def _cut(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            pair.reset()
        return len(pairs)

    def _silence(self) -> int:
        transferring = [pair for pair in self._pairs if not pair.is_silent]
        for pair in transferring:
            pair.is_silent = True
        return len(transferring)

    async def _open_port(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self._port)

    async def _close_port(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await self._connect()
        except OSError:  # the server cannot be reached
            _reset(writer)
            return
        pair = _ProxiedConnection(writer, server_writer)
        self._pairs[pair] = asyncio.current_task()
        try:
            await asyncio.gather(pair.pump(reader, server_writer), pair.pump(server_reader, writer))
        finally:
            del self._pairs[pair]

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.scheme == "unix":
            return await asyncio.open_unix_connection(self._target.path)
        return await asyncio.open_connection(self._target.hostname, self._target.port)

    def _run(self, call: Callable[[], T]) -> T:
        async def work() -> T:
            return call()

        return self._await(work())

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self._close_port()
        tasks = [task for task in self._pairs.values() if task is not None]
        self._cut()
        await asyncio.gather(*tasks)


class _ProxiedConnection:
    """One connection of a client, and the proxy's connection to the server for it."""

    def __init__(self, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter) -> None:
        self._ends = (to_client, to_server)
        self.is_silent = False

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward data until one side closes its connection, then close the other. If silenced, drop the data."""
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if not self.is_silent:
                    writer.write(data)
                    await writer.drain()
        if not self.is_silent:
            writer.close()
        elif writer is self._ends[1]:  # the client has closed a silent connection: reset the connection to the server
            self.reset()

    def reset(self) -> None:
        """Reset both connections (TCP RST)."""
        for end in self._ends:
            _reset(end)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()
