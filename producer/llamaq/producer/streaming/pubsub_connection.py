"""A pub/sub connection to one server that is made again whenever it breaks, and the channels it carries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from llamaq.common.backoff import Backoff

log = logging.getLogger(__name__)

PING_S = 5.0
"""A connection that carries nothing is asked for a sign of life this often, and given up after twice the time."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
"""The first and the longest delay before the connection is opened again."""
MESSAGES_PER_TURN = 64
"""A flood of messages must not keep the event loop from everyone else."""


class PubSubConnection:
    """Tells of each message, and each time the subscription of a channel stands; until then messages may be lost."""

    def __init__(
        self,
        make_connection: Callable[[], AbstractConnection],
        on_message: Callable[[str, bytes], None],
        on_confirmed: Callable[[str], None],
    ) -> None:
        """Starts at once, in the running event loop. The calls may neither block nor raise."""
        self._make_connection = make_connection
        self._on_message = on_message
        self._on_confirmed = on_confirmed
        self._channels: set[str] = set()
        self.confirmed: set[str] = set()
        """Channels whose subscription stands."""
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._stay_connected())
        """Runs until it is cancelled."""

    def __repr__(self) -> str:
        return f"<PubSubConnection channels={len(self._channels)} confirmed={len(self.confirmed)}>"

    @property
    def is_idle(self) -> bool:
        """Whether it carries no channel."""
        return not self._channels

    def add(self, channel: str) -> None:
        """Carry this channel from now on."""
        self._channels.add(channel)
        self._changed.set()

    def remove(self, channel: str) -> None:
        """Carry it no more."""
        self._channels.discard(channel)
        self._changed.set()

    async def _stay_connected(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            connection = self._make_connection()
            try:
                await self._serve(connection)
            except* (RedisError, OSError) as errors:
                log.warning("subscriber.disconnected error=%s", errors.exceptions[0])
                if self.confirmed:
                    backoff.reset()
            finally:
                self.confirmed.clear()
                await connection.disconnect(nowait=True)
            await asyncio.sleep(backoff.next_delay_s())

    async def _serve(self, connection: AbstractConnection) -> None:
        await connection.connect()  # type: ignore[no-untyped-call]
        # With a timeout redis-py sends within `asyncio.wait_for`, which before Python 3.12 may swallow the cancellation
        # that `aclose` needs. Who does not take what is sent gives no sign of life either.
        connection.socket_timeout = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_subscribed(connection))
            tasks.create_task(self._receive(connection))

    async def _keep_subscribed(self, connection: AbstractConnection) -> None:
        """Send what makes the connection's channels those that are wanted."""
        subscribed: set[str] = set()
        while True:
            self._changed.clear()
            wanted = set(self._channels)
            await self._send(connection, "SUBSCRIBE", wanted - subscribed)
            # Forgotten before the answer comes: who joins meanwhile must wait for a confirmation of its own.
            self.confirmed &= wanted
            await self._send(connection, "UNSUBSCRIBE", subscribed - wanted)
            subscribed = wanted
            try:
                async with asyncio.timeout(PING_S):
                    await self._changed.wait()
            except TimeoutError:
                await self._send(connection, "PING", ("",))

    async def _send(self, connection: AbstractConnection, command: str, args: Iterable[str]) -> None:
        words = list(args)
        if not words:
            return
        if not connection.is_connected:  # sending would connect again, in silence and without the other channels
            raise RedisConnectionError("the connection is closed")
        await connection.send_command(command, *words, check_health=False)

    async def _receive(self, connection: AbstractConnection) -> None:
        count = 0
        while True:
            message = await connection.read_response(timeout=2 * PING_S, disconnect_on_error=False)
            if message is None:
                raise RedisConnectionError(f"no sign of life for {2 * PING_S} s")
            self._dispatch(message)
            count += 1
            if count % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _dispatch(self, message: object) -> None:
        if not isinstance(message, list) or len(message) != 3:
            return  # an answer to PING
        kind, channel, payload = message[0], message[1].decode(), message[2]
        if kind == b"message":
            self._on_message(channel, payload)
        elif kind == b"subscribe" and channel in self._channels:
            self.confirmed.add(channel)
            self._on_confirmed(channel)
