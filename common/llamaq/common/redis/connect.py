"""Connections to Redis, made in one place so that all of them behave alike: one server, Sentinels or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.redis.cluster import Cluster
from llamaq.common.redis.retry import RetryUntilDeadline
from llamaq.common.redis.sentinel import at_master
from llamaq.common.redis.url import Kind, read_url

C = TypeVar("C", bound=AbstractConnection)

PATIENCE_S = 1.0
"""How long a command is tried again: a server that was restarted may be back by then."""
FAILOVER_S = 15.0
"""The same for a client behind Sentinels or of a cluster, where somebody will take over."""
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 5.0
"""Longer than any blocking command that llamaq sends, and shorter than a lease: a worker whose connection has fallen
silent renews its leases over another one in time."""
HEALTH_CHECK_S = 10
"""A connection that was idle for so long is asked for a sign of life before it is used."""
MAX_CONNECTIONS = 32
"""Of one process. Redis answers one command after another anyway; who finds all of them in use waits."""

NOT_THE_MASTER = ("READONLY", "MASTERDOWN", "NOREPLICAS")
"""Refusals of a server that is the master no more, or not for long; from within a script they come in a longer text."""


def connect(url: str, *, name: str, failover_s: float = FAILOVER_S) -> Redis:
    """A pool of connections that tries a cut command again; it connects at the first command.

    `name` shows in `CLIENT LIST`. With Sentinels or a cluster a command is tried for `failover_s`. Raises
    `InvalidSettings` for what is no URL of Redis.
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
    kind = sturdy(options.pop("connection_class", Connection))
    if target.kind is Kind.CLUSTER:
        options["ssl"] = issubclass(kind, SSLConnection)
        cluster = Cluster(target.hosts, kind, max(PATIENCE_S, failover_s), MAX_CONNECTIONS, options)
        return cast(Redis, cluster)  # it has the same commands, from the same classes of redis-py
    patience_s = PATIENCE_S
    if target.kind is Kind.SENTINEL:
        kind, patience_s = at_master(kind, target), max(PATIENCE_S, failover_s)
    pool = BlockingConnectionPool(
        connection_class=kind,
        max_connections=MAX_CONNECTIONS,
        timeout=None,
        retry=RetryUntilDeadline(patience_s),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
        **options,
    )
    return Redis.from_pool(pool)


@asynccontextmanager
async def own_connection(redis: Redis | Cluster) -> AsyncIterator[Redis]:
    """Commands over one connection that nobody else uses, which saves fetching one; on a cluster over those of all."""
    if isinstance(redis, Cluster):
        yield cast(Redis, redis)
        return
    async with redis.client() as client:
        yield client


def is_cluster(redis: Redis | Cluster) -> bool:
    """Whether keys with different hash tags lie apart, so that one command cannot have both."""
    return isinstance(redis, Cluster)


def node_of(redis: Redis | Cluster, key: str) -> str | None:
    """Which server of a cluster has the key, as far as is known; "" where there is but one."""
    return redis.node_of(key) if isinstance(redis, Cluster) else ""


def make_connection(redis: Redis | Cluster, node: str) -> AbstractConnection:
    """A connection to what `node_of` named, outside the pool and not yet connected."""
    if isinstance(redis, Cluster):
        return redis.make_connection(node)
    connection: AbstractConnection = redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


def sturdy(kind: type[C]) -> type[C]:
    """This kind of connection, with cancellations that always arrive, and which leaves a server that was demoted.

    redis-py sends with `asyncio.wait_for`, which on Python 3.11 swallows a cancellation, also that of a timeout, when
    it comes just as the sending is done (cpython issue 86296). The task would wait on, for ever.

    When one of these connections had no answer in time, those made before are made again before their next use: what
    silenced that one has silenced them too, and nobody shall wait for that as long once more.
    """
    silent_s = 0.0

    class Sturdy(kind):  # type: ignore[misc,valid-type]
        _made_s = 0.0

        async def _connect(self) -> None:
            self._made_s = asyncio.get_running_loop().time()
            await super()._connect()

        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            if self.is_connected and self._made_s < silent_s:
                await self.disconnect(nowait=True)
                raise RedisConnectionError("another connection made before this one has fallen silent")
            task = asyncio.current_task()
            before = task.cancelling() if task else 0
            await super().send_packed_command(*args, **kwargs)
            if task and task.cancelling() > before:
                await self.disconnect(nowait=True)  # the answer to what was sent would be taken for another's
                raise asyncio.CancelledError

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal silent_s
            try:
                return await super().read_response(*args, **kwargs)
            except RedisTimeoutError:
                silent_s = asyncio.get_running_loop().time()
                raise
            except ResponseError as exc:
                if not is_not_the_master(exc):
                    raise
                await self.disconnect(nowait=True)  # connecting again finds the master, or the server when it is one
                raise RedisConnectionError(f"the server refuses to write: {exc}") from exc

    return Sturdy


def is_not_the_master(exc: ResponseError) -> bool:
    """Whether a server refused because it is not the master; never the fault of what was asked."""
    text = str(exc)
    kind = type(exc).__name__
    return kind in ("ReadOnlyError", "MasterDownError") or any(
        text.startswith(word) or f"-{word} " in text for word in NOT_THE_MASTER
    )
