"""Connections to Redis: one server, Sentinels or a cluster. All connections of llamaq are created here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, DataError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.cluster import Cluster
from llamaq.common.redis.pool import BoundedPool
from llamaq.common.redis.sentinel import master_connection
from llamaq.common.redis.url import Topology, read_url

C = TypeVar("C", bound=AbstractConnection)

RETRY_S = 1.0
"""How long a command is retried, in seconds: a restarted server may answer again by then."""
FAILOVER_S = 15.0
"""How long a command is retried with Sentinels and clusters, in seconds. A failover takes longer than a restart."""
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 5.0
"""Longer than every blocking command of llamaq. Shorter than a lease: if the server does not answer on a connection, a
worker can still renew its leases over another connection in time."""
CLOSE_TIMEOUT_S = 0.5
"""How long the close of a TLS connection waits for the server."""
HEALTH_CHECK_S = 10
"""A connection that was idle for longer is tested with PING before it is used."""
MAX_CONNECTIONS = 32
"""Upper bound for one client and server. Further commands wait for a free connection. Redis executes one command after
another, so more connections are not faster."""
NOT_THE_MASTER = ("READONLY", "MASTERDOWN", "NOREPLICAS")
"""Errors of a server that is not the master, or will soon not be the master. After an error inside a script, the code
is in the middle of the text."""


def connect(url: str, *, name: str, failover_s: float = FAILOVER_S) -> Redis:
    """Return a client with a pool of connections. It connects at the first command, and retries after lost connections.

    Args:
        url: URL of Redis; see `docs/redis.md`.
        name: Name of the connections in `CLIENT LIST`.
        failover_s: How long a command is retried with Sentinels or a cluster, in seconds.

    Raises:
        InvalidSettings: The URL is not valid.
    """
    target = read_url(url)
    options: dict[str, Any] = {
        "protocol": 2,
        "client_name": name,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        **target.options,
    }
    connection_class = explaining_connection(options.pop("connection_class", Connection))
    if target.topology is Topology.CLUSTER:

        def make_node_pool(address: tuple[str, int], limit: int | None) -> BoundedPool:
            host, port = address
            # A class of its own, so that only the connections to this node reconnect after a timeout.
            return _make_pool(robust_connection(connection_class), {**options, "host": host, "port": port}, limit)

        return Cluster(target.hosts, make_node_pool, max(RETRY_S, failover_s))
    kind, retry_s = robust_connection(connection_class), RETRY_S
    if target.topology is Topology.SENTINEL:
        kind, retry_s = master_connection(kind, target), max(RETRY_S, failover_s)
    return RetryingRedis(_make_pool(kind, options), retry_s)


def _make_pool(kind: type[AbstractConnection], options: dict[str, Any], limit: int | None = None) -> BoundedPool:
    return BoundedPool(
        connection_class=kind,
        max_connections=limit or MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),  # the client retries: it holds no connection between two tries
        **options,
    )


class NotTheMaster(RedisConnectionError):
    """A server refused a command because it is a replica. The connection has been closed: the next one may find the
    new master.
    """


def is_cluster(redis: Redis) -> bool:
    """Return whether this is a cluster, where one command cannot use keys with different hash tags."""
    return isinstance(redis, Cluster)


def node_of(redis: Redis, key: str) -> str | None:
    """Return the name of the cluster node that has the key. None: it is not known. Empty: there is only one server."""
    return redis.node_of(key) if isinstance(redis, Cluster) else ""


def make_connection(redis: Redis, node: str) -> AbstractConnection:
    """Return a new connection to a node that `node_of` named. It is not connected, and not part of a pool."""
    pool = redis.pool_of(node) if isinstance(redis, Cluster) else redis.connection_pool
    connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


def explaining_connection(kind: type[C]) -> type[C]:
    """Return a subclass of this connection class whose errors name the probable cause of a failed attempt to connect.

    The connection is closed after such an attempt. The next attempt reads the certificate files again, because they may
    have been replaced.
    """
    uses_tls = issubclass(kind, SSLConnection)

    class ExplainingConnection(kind):  # type: ignore[misc,valid-type]
        async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
            try:
                await super().connect_check_health(*args, **kwargs)
            except BaseException as exc:
                # redis-py leaves a connection open whose handshake was cancelled, and a Unix socket whose database was
                # refused. The next command would use database 0.
                await self.disconnect(nowait=True)
                if not isinstance(exc, RedisError):
                    raise
                if uses_tls:
                    self.ssl_context.context = None
                if (explained := _explain(exc, uses_tls)) is None:
                    raise
                raise explained from exc

    return ExplainingConnection


def _explain(error: RedisError, uses_tls: bool) -> RedisError | None:
    """Return an error that names the probable cause of a failed attempt to connect. None: the error itself does.

    A server without TLS waits for the rest of a TLS handshake. A server with TLS closes connections without TLS.
    """
    text = str(error)
    if isinstance(error.__cause__ or error, AuthenticationError):  # redis-py wraps the error of a Unix socket
        return AuthenticationError(f"user or password of --redis-url (LLAMAQ_REDIS_URL) refused: {text}")
    if "DB index" in text:
        return ResponseError(f"database of --redis-url (LLAMAQ_REDIS_URL) refused: {text}; usual are 0 to 15")
    if uses_tls and isinstance(error, RedisTimeoutError):
        return RedisTimeoutError(f"{text}; a server without TLS needs redis:// in place of rediss://")
    if not uses_tls and ("closed by server" in text or "while reading" in text):
        return RedisConnectionError(f"{text.rstrip('.')}; a server with TLS needs rediss:// in place of redis://")
    return None


def robust_connection(kind: type[C]) -> type[C]:
    """Return a subclass of this connection class that fixes seven defects.

    - Lost cancellations, and a task for each command. redis-py sends with `asyncio.wait_for`. On Python 3.11, it
      creates a task, and loses a cancellation or timeout that arrives when the send completes (cpython issue 86296).
    - Sends without a limit. redis-py sends with `writelines`. On Python 3.12.0 to 3.12.8, 3.13.0 and 3.13.1, `drain`
      does not wait for what it has buffered (CVE-2024-12254): no send times out, and unsent data has no bound.
    - Repeated timeouts. After a timeout, every older connection reconnects before its next use, because the same outage
      may have broken it.
    - Demoted masters. A connection whose server refuses writes reconnects, which finds the new master.
    - Connections that close during a command, when a node leaves a cluster. redis-py raises an `AttributeError`.
    - Slow closes. A TLS connection waits for its server: a silent server took 5 s, and caused an error.
    - Slow commands. The asyncio connections of redis-py encode commands in Python, which takes eight times as long as
      hiredis: 19 us for the 25 arguments of a submit.
    """
    last_timeout_s = 0.0

    class RobustConnection(kind):  # type: ignore[misc,valid-type]
        _connected_s = 0.0
        pack_command = _pack_command

        async def _connect(self) -> None:
            self._connected_s = asyncio.get_running_loop().time()
            await super()._connect()

        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if self.is_connected and self._connected_s < last_timeout_s:
                await self.disconnect(nowait=True)
                raise RedisConnectionError("a newer connection timed out, so this one reconnects")
            with _closing_is_a_connection_error(self):
                await _prepare_to_send(self, check_health)
                await _send(self, command)

        async def disconnect(self, nowait: bool = False, **kwargs: Any) -> None:
            # After an error, do not wait until a server that does not answer has received the rest of the data.
            nowait = nowait or kwargs.get("error") is not None
            await _wait_for_close(self._writer, super().disconnect(nowait=nowait, **kwargs))

        def note_timeout(self) -> None:
            """Let all older connections reconnect before their next use."""
            nonlocal last_timeout_s
            last_timeout_s = asyncio.get_running_loop().time()

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                with _closing_is_a_connection_error(self):
                    return await super().read_response(*args, **kwargs)
            except RedisTimeoutError:
                self.note_timeout()
                raise
            except ResponseError as exc:
                if not is_not_the_master(exc):
                    raise
                await self.disconnect(nowait=True)
                raise NotTheMaster(f"the server refuses to write: {exc}") from exc

    return RobustConnection


def _pack_command(_: AbstractConnection, *args: Any) -> list[bytes]:
    """Encode a command. Its name may have several words, such as `CLIENT SETNAME`.

    Raises:
        DataError: An argument is no text, number or bytes.
    """
    name = args[0].encode() if isinstance(args[0], str) else args[0]
    try:
        return [hiredis.pack_command((*name.split(), *args[1:]))]
    except TypeError as exc:
        raise DataError(f"{name.decode()}: {exc}") from exc


async def _prepare_to_send(connection: Any, check_health: bool) -> None:
    if not connection.is_connected:
        await connection.connect_check_health(check_health=False)
    if check_health:
        await connection.check_health()


async def _send(connection: Any, command: Any) -> None:
    """Send a packed command within the timeout of the connection. After an error, the connection is closed."""
    encoded = command.encode() if isinstance(command, str) else command
    parts = [encoded] if isinstance(encoded, bytes) else encoded
    try:
        async with asyncio.timeout(connection.socket_timeout):
            if isinstance(connection._writer, asyncio.StreamWriter):
                connection._writer.write(b"".join(parts))
                await connection._writer.drain()
            else:  # fakeredis has a writer of its own
                await connection._send_packed_command(parts)
    except BaseException as exc:
        await connection.disconnect(nowait=True)  # otherwise the next command would read the reply to this one
        if isinstance(exc, TimeoutError):
            raise RedisTimeoutError("the command could not be sent in time") from None
        if isinstance(exc, OSError):
            raise RedisConnectionError(f"the command could not be sent: {exc}") from exc
        raise


async def _wait_for_close(writer: Any, closing: Awaitable[None]) -> None:
    """Close a connection. Abort it if a server with TLS does not end it in time."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
    except (TimeoutError, RedisTimeoutError):
        writer.transport.abort()


@contextmanager
def _closing_is_a_connection_error(connection: AbstractConnection) -> Iterator[None]:
    try:
        yield
    except (AttributeError, RuntimeError) as exc:
        if connection.is_connected:
            raise
        raise RedisConnectionError("the connection was closed during a command") from exc


def is_not_the_master(exc: ResponseError) -> bool:
    """Return whether a server refused a command because it is not the master."""
    text = str(exc)
    kind = type(exc).__name__
    return kind in ("ReadOnlyError", "MasterDownError") or any(
        text.startswith(word) or f"-{word} " in text for word in NOT_THE_MASTER
    )
