"""A client of Redis Cluster with the same errors, retries and limits as the client of a single server."""

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

# Commands that may wait in Redis. They do not count against the limit of commands in flight.
BLOCKING = ("XREAD", "XREADGROUP")


class Cluster(RedisCluster):
    """Sends each command to the master of its key's hash slot, and finds the new master after a change.

    redis-py's client retries without pauses; this client retries every command with pauses until a deadline. Every
    error is a `RedisError`, also when no node can be reached.
    """

    def __init__(
        self,
        hosts: Iterable[tuple[str, int]],
        connection_class: type[Connection],
        retry_s: float,
        max_commands: int,
        options: dict[str, Any],
    ) -> None:
        """Create a client, which connects at the first command.

        Args:
            hosts: Host and port of some nodes.
            connection_class: Class of the connections.
            retry_s: How long a command is retried, in seconds.
            max_commands: Maximum number of commands in flight. Further commands wait.
            options: Further arguments of `RedisCluster`.
        """
        nodes = [ClusterNode(host, port) for host, port in hosts]
        super().__init__(
            startup_nodes=nodes,
            require_full_coverage=False,  # partitions on reachable nodes continue
            reinitialize_steps=0,  # otherwise redis-py closes all connections, including those in use
            retry=Retry(NoBackoff(), 0),  # no retries: those of redis-py have no pauses and close all connections
            max_connections=10_000,
            **options,
        )
        self.connection_kwargs["connection_class"] = connection_class
        for node in self.startup_nodes:
            node.connection_class = connection_class
        self._retry_s = retry_s
        self._in_flight = asyncio.Semaphore(max_commands)

    def __repr__(self) -> str:
        return f"<Cluster nodes={sorted(self.nodes_manager.nodes_cache)}>"

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """See `RedisCluster.execute_command`."""
        send = super().execute_command
        if args[0] in BLOCKING:
            return await self.call_with_retry(lambda: send(*args, **kwargs))
        async with self._in_flight:
            return await self.call_with_retry(lambda: send(*args, **kwargs))

    async def _determine_slot(self, command: str, *args: Any) -> int:
        if command in BLOCKING:  # otherwise redis-py asks the server for the key positions each time
            return self.keyslot(args[args.index(b"STREAMS") + 1])
        return int(await super()._determine_slot(command, *args))

    def pipeline(self, transaction: bool | None = None, shard_hint: None = None) -> ClusterPipeline:  # noqa: ARG002
        """See `RedisCluster.pipeline`."""
        return RetryingPipeline(self, transaction)  # type: ignore[abstract]  # redis-py's own annotations

    async def call_with_retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`. After an error reload the cluster map and call again, until the deadline.

        Raises:
            RedisError: The last error.
        """

        async def attempt() -> T:
            try:
                return await call()
            except (RedisClusterException, ClusterDownError) as exc:
                raise RedisConnectionError(str(exc)) from exc

        async def reload_map(_: Exception) -> None:
            self._initialize = True  # redis-py reads the map of the cluster before the next command

        return await RetryUntilDeadline(self._retry_s).call_with_retry(attempt, reload_map)

    def node_of(self, key: str) -> str | None:
        """Return the name of the master that has the key. None: it is not known."""
        nodes = self.nodes_manager.slots_cache.get(self.keyslot(key))
        return nodes[0].name if nodes else None

    def make_connection(self, node: str) -> Connection:
        """Return a new connection to this node. It is not connected, and not part of the node's pool."""
        host, _, port = node.rpartition(":")
        return ClusterNode(host, int(port), **self.connection_kwargs).acquire_connection()


class RetryingPipeline(ClusterPipeline):
    """A pipeline that keeps its commands, so that all of them can be sent again after an error."""

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
        """Send all queued commands to their nodes, and return the replies in the order of the commands."""
        commands, self._commands = self._commands, []

        async def send() -> list[Any]:
            pipe = ClusterPipeline(self._cluster, self._is_transaction)  # type: ignore[abstract]
            for args, kwargs in commands:
                pipe.execute_command(*args, **kwargs)
            return await pipe.execute(raise_on_error, allow_redirections)

        return await self._cluster.call_with_retry(send)
