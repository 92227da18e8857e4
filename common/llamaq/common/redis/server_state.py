"""Reads the clock of the Redis server, how much memory it uses, and how much it may use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from llamaq.common.redis.cluster import Cluster

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def server_time_ms(redis: Redis, key: str | None = None) -> int:
    """Return the time of the Redis server in milliseconds since the epoch. Use it for times that several hosts compare.

    On a cluster, the clocks of the nodes differ. With `key`, the time is that of the node with the key. The Lua scripts
    read the same clock with `now_ms` of `_lib.lua`.

    Raises:
        RedisError: The server cannot be reached.
    """
    reading: Any = redis.time() if key is None else redis.eval("return redis.call('TIME')", 1, key)
    seconds, microseconds = await reading
    return int(seconds) * 1000 + int(microseconds) // 1000


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of one server. `node` is empty if Redis is no cluster, `max_bytes` is 0 without a limit."""

    node: str
    used_bytes: int
    max_bytes: int

    @property
    def fullness(self) -> float:
        """The used share of `maxmemory`; 0 without a limit."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0


async def read_server_memory(redis: Redis) -> tuple[ServerMemory, ...]:
    """Return the memory of the server, or of each master of a Redis Cluster.

    A server is left out if the user of Redis has no permission for INFO there, or the server does not tell.
    """
    servers = await redis.masters() if isinstance(redis, Cluster) else {"": redis}
    found = await asyncio.gather(*(_read(node, server) for node, server in servers.items()))
    return tuple(memory for memory in found if memory is not None)


async def _read(node: str, server: Redis) -> ServerMemory | None:
    try:
        memory: dict[str, Any] = await server.info("memory")
        return ServerMemory(node, int(memory["used_memory"]), int(memory["maxmemory"]))
    except (ResponseError, KeyError):
        return None
