"""A pool of connections to one server, with an upper bound."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

CLOSED_POOL = "the connections are closed"


class BoundedPool(ConnectionPool):
    """Lends at most `max_connections` connections. Further commands wait in the order of their calls.

    When a connection attempt fails, all commands that wait for a connection fail too. Otherwise 1,000 commands to a
    server that does not answer would fail one group after another, each after its own connection timeout.

    redis-py's `BlockingConnectionPool` is not used: there a waiting command fails only after it has got a connection
    itself, and a cancelled one may consume the wake-up of another (cpython issue 112202).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.is_closed = False

    def make_connection(self) -> Any:
        """Return a new connection. It does not send CLIENT SETINFO, with which Redis 6.2 would fill its ACL log."""
        connection = super().make_connection()  # type: ignore[no-untyped-call]
        connection.driver_info = connection.lib_name = connection.lib_version = None
        return connection

    async def get_connection(self, *_: Any, **__: Any) -> AbstractConnection:
        """Return a connected connection. Wait for it while all connections are in use.

        Raises:
            RedisError: The server cannot be reached, or the pool is closed.
        """
        await self._wait_for_turn()
        connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            if not self.is_closed:
                await self.ensure_connection(connection)
            if self.is_closed:
                raise RedisConnectionError(CLOSED_POOL)
        except BaseException as exc:
            await self.release(connection)
            if isinstance(exc, RedisConnectionError | RedisTimeoutError):
                self.fail_waiting(exc)
            raise
        return connection

    @property
    def has_idle_connection(self) -> bool:
        """Whether a connection that was opened before is not in use."""
        return bool(self._available_connections)

    async def _wait_for_turn(self) -> None:
        """Return when a connection is free for this command. Commands that began to wait earlier come first."""
        if not self._waiting and self.can_get_connection():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._wake()
        try:
            await turn
        except BaseException:
            self._waiting.remove(turn)
            self._wake()  # another command may have the connection
            raise
        self._waiting.remove(turn)

    async def release(self, connection: AbstractConnection) -> None:
        """Take a connection back, and wake the command that has waited longest.

        redis-py's own method also tells listeners, which llamaq does not have.
        """
        if self.is_closed:
            await connection.disconnect(nowait=True)
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)
        self._wake()

    def _wake(self) -> None:
        """Wake as many waiting commands as connections are free. They stay in the list until they take them."""
        n_free = self.max_connections - len(self._in_use_connections)
        for turn in islice(self._waiting, n_free):
            if not turn.done():
                turn.set_result(None)

    def fail_waiting(self, error: RedisError) -> None:
        """Let all commands that wait for a connection fail, because the server does not answer."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(type(error)(*error.args))

    async def aclose(self) -> None:
        """Close the connections. Commands that wait fail."""
        self.is_closed = True
        self.fail_waiting(RedisConnectionError(CLOSED_POOL))
        await super().aclose()

    def __repr__(self) -> str:
        return f"<BoundedPool in_use={len(self._in_use_connections)} waiting={len(self._waiting)}>"
