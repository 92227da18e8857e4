"""Redis Sentinel: connections that find the master when they connect, and disconnect when another server replaces it.

Sentinel closes the connections to a demoted master some seconds after it has named the new one. What is written until
then is lost. So a connection in use asks the Sentinels again every second, and an idle one waits for their answer
before it sends a command.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

from redis.asyncio import Sentinel
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from llamaq.common.redis.url import RedisUrl

C = TypeVar("C", bound=AbstractConnection)

SENTINEL_TIMEOUT_S = 1.0
"""A Sentinel that does not answer within this time is skipped."""
ASK_EVERY_S = 1.0
MAX_ANSWER_AGE_S = 2.0
"""A command waits for a new answer if the last one is older."""


class MasterFinder:
    """Asks the Sentinels for the address of the master, and remembers the answer."""

    def __init__(self, target: RedisUrl) -> None:
        options = {
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),  # the next Sentinel is asked instead
            **(target.sentinel_options or {}),
        }
        self._sentinel: Any = Sentinel(target.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        self._service = target.service
        self._lock = asyncio.Lock()
        self._master: tuple[str, int] | None = None
        self._outcome: tuple[str, int] | RedisConnectionError = RedisConnectionError("no Sentinel was asked")
        """What the last question to the Sentinels has led to."""
        self._begun_s = -inf
        """Event-loop time at which this question began."""
        self._asked_s = 0.0
        """Event-loop time at which the last question to the Sentinels ended."""
        self._refresh: asyncio.Task[None] | None = None

    async def find(self) -> tuple[str, int]:
        """Ask the Sentinels and return host and port of the master. If no Sentinel answers, the last answer counts.

        Calls that wait while the Sentinels are asked share the next answer. Otherwise, each of many connections would
        wait for the time limits of all silent Sentinels, one connection after the other.

        Raises:
            RedisError: No Sentinel names a master.
        """
        called_s = asyncio.get_running_loop().time()
        async with self._lock:
            if self._begun_s < called_s:
                await self._ask_again()
            if isinstance(self._outcome, RedisConnectionError):
                raise RedisConnectionError(*self._outcome.args) from self._outcome.__cause__
            return self._outcome

    async def _ask_again(self) -> None:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        try:
            self._outcome = self._master = await self._ask()
        except RedisConnectionError as exc:
            self._outcome = exc
        finally:
            self._asked_s = clock()
            for sentinel in self._sentinel.sentinels:  # redis-py 6.4 has no `Sentinel.aclose`
                await sentinel.aclose()
        self._begun_s = begun_s

    async def _ask(self) -> tuple[str, int]:
        """Ask one Sentinel after another. The next call begins with the one that has named the master.

        redis-py's `discover_master` hides the errors of the Sentinels, such as a failed TLS handshake.
        """
        sentinels, errors = self._sentinel.sentinels, []
        for place, sentinel in enumerate(sentinels):
            try:
                state = (await sentinel.sentinel_masters()).get(self._service)
            except RedisError as exc:
                errors.append(exc)
                await sentinel.aclose()
                sentinel.connection_pool.reset()  # a new connection reads the certificate files again
                continue
            if state and self._sentinel.check_master_state(state, self._service):
                sentinels[0], sentinels[place] = sentinel, sentinels[0]
                return state["ip"], state["port"]
        if self._master is not None and len(errors) == len(sentinels):
            return self._master
        error = errors[-1] if errors else None
        reason = f": {error}" if error else ""
        raise RedisConnectionError(f"no Sentinel names a master {self._service!r}{reason}") from error

    async def is_master(self, address: tuple[str, int]) -> bool:
        """Return whether the last answer names this address. An answer older than a second is refreshed."""
        age_s = asyncio.get_running_loop().time() - self._asked_s
        if age_s >= ASK_EVERY_S and (self._refresh is None or self._refresh.done()):
            self._refresh = asyncio.create_task(self._find_quietly())
        if age_s >= MAX_ANSWER_AGE_S and self._refresh is not None:
            await asyncio.shield(self._refresh)
        return self._master is None or address == self._master

    async def _find_quietly(self) -> None:
        with suppress(RedisError, OSError):
            await self.find()


def master_connection(kind: type[C], target: RedisUrl) -> type[C]:
    """Return a subclass of this connection class that connects to the master which the Sentinels name."""
    finder = MasterFinder(target)

    class MasterConnection(kind):  # type: ignore[misc,valid-type]
        async def _connect(self) -> None:
            self.host, self.port = await finder.find()
            await super()._connect()

        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            if self.is_connected and not await finder.is_master((self.host, self.port)):
                await self.disconnect(nowait=True)
                raise RedisConnectionError(f"{self.host}:{self.port} is no longer the master")
            await super().send_packed_command(*args, **kwargs)

    return MasterConnection
