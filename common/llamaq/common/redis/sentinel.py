"""Redis Sentinel: connections that find the master when they connect, and leave it when another one was made master.

Sentinel closes the connections of a master that it demotes, but some seconds after it has named the new one, and what
is written to the old one until then is lost. So a connection in use has the Sentinels asked again every second, and
one that was idle waits for their answer before it sends anything.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import Sentinel
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from llamaq.common.redis.url import RedisUrl

C = TypeVar("C", bound=AbstractConnection)

TIMEOUT_S = 1.0
"""For one Sentinel to answer; then the next one is asked."""
ASK_EVERY_S = 1.0
STALE_S = 2.0
"""An older answer is not relied on."""


class Sentinels:
    """Those who know where the master is."""

    def __init__(self, target: RedisUrl) -> None:
        timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        self._sentinel: Any = Sentinel(target.hosts, sentinel_kwargs=timeouts | (target.sentinel_options or {}))  # type: ignore[no-untyped-call]
        self._service = target.service
        self._one_asks = asyncio.Lock()
        self._master: tuple[str, int] | None = None
        self._asked_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def find(self) -> tuple[str, int]:
        """Host and port of the master; raises a `RedisError` when no Sentinel names one."""
        async with self._one_asks:
            self._asked_s = asyncio.get_running_loop().time()
            try:
                master: tuple[str, int] = await self._sentinel.discover_master(self._service)
            finally:
                await self._sentinel.aclose()
            self._master = master
            return master

    async def is_master(self, place: tuple[str, int]) -> bool:
        """Whether this was the master when they were last asked, a moment ago; they are asked again meanwhile."""
        age_s = asyncio.get_running_loop().time() - self._asked_s
        if age_s >= ASK_EVERY_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())
        if age_s >= STALE_S and self._asking is not None:
            await asyncio.shield(self._asking)
        return self._master is None or place == self._master

    async def _ask(self) -> None:
        with suppress(RedisError, OSError):
            await self.find()


def at_master(kind: type[C], target: RedisUrl) -> type[C]:
    """This kind of connection, to whom the Sentinels name."""
    sentinels = Sentinels(target)

    class AtMaster(kind):  # type: ignore[misc,valid-type]
        async def _connect(self) -> None:
            self.host, self.port = await sentinels.find()
            await super()._connect()

        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            if self.is_connected and not await sentinels.is_master((self.host, self.port)):
                await self.disconnect(nowait=True)
                raise RedisConnectionError(f"{self.host}:{self.port} is not the master any more")
            await super().send_packed_command(*args, **kwargs)

    return AtMaster
