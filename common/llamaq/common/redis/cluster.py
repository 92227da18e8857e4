"""Redis Cluster: redis-py's client with errors, pauses and limits like those of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from redis.asyncio.cluster import ClusterNode, ClusterPipeline, RedisCluster
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, RedisClusterException
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.common.redis.retry import RetryUntilDeadline

T = TypeVar("T")

BLOCKING = ("XREAD", "XREADGROUP")
"""Commands that may wait in Redis, and so do not count against the limit."""


class Cluster(RedisCluster):
    """Sends each command to the master of its key's slot, and follows when slots or masters change.

    Every command is tried again for `patience_s`, with pauses, which redis-py does not make here. What it raises is a
    `RedisError`, also when no node can be reached.
    """

    def __init__(
        self,
        hosts: Iterable[tuple[str, int]],
        connection_class: type[Connection],
        patience_s: float,
        max_commands: int,
        options: dict[str, Any],
    ) -> None:
        """`max_commands` of this process are on their way at once; the others wait."""
        nodes = [ClusterNode(host, port) for host, port in hosts]
        super().__init__(
            startup_nodes=nodes,
            require_full_coverage=False,  # what is there is of use
            reinitialize_steps=0,  # it would close all connections, those in use too
            retry=Retry(NoBackoff(), 0),  # its retries make no pause, and close all connections
            max_connections=10_000,
            **options,
        )
        self.connection_kwargs["connection_class"] = connection_class
        for node in self.startup_nodes:
            node.connection_class = connection_class
        self._patience_s = patience_s
        self._room = asyncio.Semaphore(max_commands)

    def __repr__(self) -> str:
        return f"<Cluster nodes={sorted(self.nodes_manager.nodes_cache)}>"

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """See `RedisCluster.execute_command`."""
        send = super().execute_command
        if args[0] in BLOCKING:
            return await self.insist(lambda: send(*args, **kwargs))
        async with self._room:
            return await self.insist(lambda: send(*args, **kwargs))

    async def _determine_slot(self, command: str, *args: Any) -> int:
        if command in BLOCKING:  # redis-py asks the server where the keys are, each time
            return self.keyslot(args[args.index(b"STREAMS") + 1])
        return int(await super()._determine_slot(command, *args))

    def pipeline(self, transaction: bool | None = None, shard_hint: None = None) -> ClusterPipeline:  # noqa: ARG002
        """See `RedisCluster.pipeline`."""
        return Pipeline(self, transaction)  # type: ignore[abstract]  # redis-py's own annotations

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call, and again after an error that another look at the cluster may mend. Raises `RedisError`."""

        async def attempt() -> T:
            try:
                return await call()
            except (RedisClusterException, ClusterDownError) as exc:
                raise RedisConnectionError(str(exc)) from exc

        async def look_again(_: Exception) -> None:
            self._initialize = True  # redis-py reads the map of the cluster before the next command

        return await RetryUntilDeadline(self._patience_s).call_with_retry(attempt, look_again)

    def node_of(self, key: str) -> str | None:
        """The name of the master that has the key; None while that is not known."""
        nodes = self.nodes_manager.slots_cache.get(self.keyslot(key))
        return nodes[0].name if nodes else None

    def make_connection(self, node: str) -> Connection:
        """A connection to this node, outside its pool and not yet connected."""
        host, _, port = node.rpartition(":")
        return ClusterNode(host, int(port), **self.connection_kwargs).acquire_connection()


class Pipeline(ClusterPipeline):
    """Keeps its commands, so that all of them can be sent again after an error."""

    def __init__(self, cluster: Cluster, transaction: bool | None) -> None:
        super().__init__(cluster, transaction)
        self._cluster = cluster
        self._is_transaction = transaction
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __len__(self) -> int:
        return len(self._commands)

    def execute_command(self, *args: Any, **kwargs: Any) -> ClusterPipeline:
        """Queue a command."""
        self._commands.append((args, kwargs))
        return self

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        """Send everything queued, to several nodes where need be, and return the answers in order."""
        commands, self._commands = self._commands, []

        async def send() -> list[Any]:
            pipe = ClusterPipeline(self._cluster, self._is_transaction)  # type: ignore[abstract]
            for args, kwargs in commands:
                pipe.execute_command(*args, **kwargs)
            return await pipe.execute(raise_on_error, allow_redirections)

        return await self._cluster.insist(send)
