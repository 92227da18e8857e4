"""Runs the application with uvicorn: sockets, TLS, limits of connections, graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import select
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import InvalidSettings
from llamaq.gateway.app import build_app
from llamaq.gateway.http.certificate_renewal import CertificateRenewal, load_certificate
from llamaq.gateway.http.open_requests import OpenRequests
from llamaq.gateway.settings import ServeSettings

MAX_HEADER_BYTES = 64 * 1024
MAX_TINY_CHUNKS, TINY_CHUNK_BYTES = 10_000, 32
"""A body with more chunks than the first number must have at least the second number of bytes for each chunk."""
ANSWER_TIME_S = 2
"""Seconds that the server has to end the requests that are still open after `shutdown_s`. Then uvicorn cancels them.
Their connections stay open for `LAST_REQUESTS_S` afterwards, which is not part of this time."""
DEAD_CLIENT = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""After 30 s of silence, a client that answers no probe within 30 s is gone, and so is one that takes no data for 60 s.
macOS does not have the first and the last option.
"""
GC_THRESHOLD = 20_000
"""Number of new objects that start a garbage collection. With Python's 700, a large body takes twice as long."""
KEEP_ALIVE_S = 620
"""Seconds that an idle connection stays open. Proxies and clients close theirs first: Go and Traefik after 90 s, Caddy
after 120 s, the load balancers of Google after 600 s, for which Google advises 620 s. If the server closed a connection
at the moment at which a proxy sends a request, the proxy would answer with 502. A peer that has gone is found earlier
(`DEAD_CLIENT`), and a server that stops closes its idle connections."""
LAST_REQUESTS_S = 0.5
"""How long idle connections stay open after the server began to stop. A request that a client sends in this time is
answered, and the response announces the close. If the server closed the connection at the moment at which a proxy sends
a request, the proxy would answer with 502."""
ACCEPTING_S = 0.05
"""Time in which asyncio opens the connections that the server has accepted before it stops to listen."""
CLOSE = (b"connection", b"close")
"""The header that announces that the server closes the connection after the response."""


class ChunkLimit(h11.Connection):
    """A connection that refuses a body in very many tiny chunks.

    h11 needs about 20 µs for a chunk, and uvicorn handles all data that it has received in one step. One client that
    sends single bytes would delay all streams by a second again and again.
    """

    _n_chunks = 0
    _n_bytes = 0

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: The client has sent something else than HTTP, or too many tiny chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._n_chunks += event.chunk_end
            self._n_bytes += len(event.data)
            if self._n_chunks > MAX_TINY_CHUNKS and self._n_bytes < self._n_chunks * TINY_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many tiny chunks")
        elif isinstance(event, h11.Request):
            self._n_chunks = self._n_bytes = 0
        return event


class ClientConnection(H11Protocol):
    """uvicorn's protocol, which also closes a connection if its headers do not arrive in time.

    When the server stops, it announces the close of the connection, and answers a request that has arrived before. It
    reads on during an answer, so that it notices when a client that has sent more than its request disconnects.
    """

    header_timeout_s = 20.0
    conn: h11.Connection
    _header_timer: asyncio.TimerHandle | None = None
    _closes_when_idle = False

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the headers of the first request."""
        super().connection_made(transport)
        self.conn = ChunkLimit(h11.SERVER, MAX_HEADER_BYTES)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Begin to wait for the headers of a next request, or end the wait."""
        if self.conn.their_state is h11.MUST_CLOSE:  # otherwise uvicorn would answer that the request is invalid
            return
        super().data_received(data)
        self._watch_headers()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_HEADER_BYTES:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        super().connection_lost(exc)
        self._stop_timer()

    def announce_close(self) -> None:
        """Add `Connection: close` to the response to the current request, if the response has not begun."""
        if self.cycle is not None:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE]

    def shutdown(self) -> None:
        """Close the connection when it is idle.

        A request that has arrived, but is not read yet, is answered first. A response that has begun without an
        announcement may be followed by a further request, whose response announces the close.
        """
        if self.conn.their_state is h11.IDLE:
            if not self._has_unread_data():
                super().shutdown()
        elif self.conn.our_state is h11.SEND_BODY:
            self._closes_when_idle = True
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if self._closes_when_idle and not self.transport.is_closing():
            self.loop.call_later(LAST_REQUESTS_S, self.shutdown)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore `Upgrade`, as HTTP allows. Java's client offers HTTP/2 with each request by it.

        uvicorn would log a warning for each request, and advise to install packages.
        """

    def _has_unread_data(self) -> bool:
        if self.transport.is_closing():
            return False
        poll = select.poll()  # `select.select` is limited to 1024 files
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def _watch_headers(self) -> None:
        is_answered = self.conn.our_state is h11.DONE  # a refusal may come before the end of the request body
        if self.conn.their_state is not h11.IDLE and not is_answered:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._refuse)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()


class AnsweringServer(uvicorn.Server):
    """uvicorn's server, which also answers the requests that are still open `shutdown_s` after it began to stop.

    It loads a renewed certificate too.
    """

    def __init__(self, config: uvicorn.Config, open_requests: OpenRequests, settings: ServeSettings) -> None:
        super().__init__(config)
        self._open_requests = open_requests
        self._settings = settings
        self._renewing: asyncio.Task[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Run the server with few garbage collections and with the hard limit of open files. The soft is often 1024."""
        gc.set_threshold(GC_THRESHOLD)
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError):  # macOS has a hard limit that it does not allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. After SIGTERM the exit code is 0, whereas uvicorn would end the process by the signal."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and watch the files of the certificate from now on."""
        await super().startup(sockets)
        cert, key, context = self._settings.tls_cert, self._settings.tls_key, self.config.ssl
        if cert is not None and key is not None and context is not None:
            self._renewing = asyncio.create_task(CertificateRenewal(context, cert, key).watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: accept no more connections, and wait for the open requests."""
        if self._renewing is not None:
            self._renewing.cancel()
        for connection in self.server_state.connections:
            cast("ClientConnection", connection).announce_close()
        self.server_state.default_headers.append(CLOSE)
        accepting = self._stop_listening(sockets or [])
        await asyncio.sleep(ACCEPTING_S)
        if self.server_state.connections:
            await asyncio.sleep(LAST_REQUESTS_S)
        await cancel_tasks(*accepting)
        ending = asyncio.get_running_loop().call_later(self._settings.shutdown_s, self._open_requests.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def _stop_listening(self, sockets: list[socket.socket]) -> list[asyncio.Task[Any]]:
        """Close the sockets. Connections that wait are accepted first, because the system would reset them.

        Returns:
            Tasks that serve these connections.
        """
        waiting: list[socket.socket] = []
        for listening in sockets:
            with suppress(OSError):  # no connection waits
                while True:
                    waiting.append(listening.accept()[0])
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl))
            for connection in waiting
        ]

    def _protocol(self) -> H11Protocol:
        protocol = cast("type[H11Protocol]", self.config.http_protocol_class)
        return protocol(self.config, self.server_state, self.lifespan.state)


def build_server(settings: ServeSettings) -> uvicorn.Server:
    """Return the server. `serve` of it listens until SIGTERM or SIGINT.

    Raises:
        InvalidSettings: The certificate or its key cannot be used.
    """
    _check_tls(settings)
    app = build_app(settings)
    return AnsweringServer(
        uvicorn.Config(
            app,
            host=settings.http_host,
            port=settings.http_port,
            http=type("Protocol", (ClientConnection,), {"header_timeout_s": settings.header_timeout_s}),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.shutdown_s + LAST_REQUESTS_S) + ANSWER_TIME_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        ),
        app.state.open_requests,
        settings,
    )


def _check_tls(settings: ServeSettings) -> None:
    if settings.tls_cert is None or settings.tls_key is None:  # the settings allow both or none
        return
    for name, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        if not path.is_file():
            raise InvalidSettings(f"{name}: there is no file {path}")
    try:
        load_certificate(settings.tls_cert, settings.tls_key)
    except OSError as exc:  # SSLError is a subclass
        raise InvalidSettings(f"tls_cert, tls_key: the files cannot be used: {exc.strerror or exc}") from exc


def bind(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens at the address of the settings. Connections wait until the server accepts them.

    Raises:
        OSError: The address is in use, or is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.http_host, settings.http_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit it
        for name, value in DEAD_CLIENT.items():
            if hasattr(socket, name):
                bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        bound.bind(address)
        bound.listen(2048)
    except BaseException:
        bound.close()
        raise
    return bound


def url_of(settings: ServeSettings, bound: socket.socket) -> str:
    """Return the URL of a listening server."""
    host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{bound.getsockname()[1]}"
