"""A pub/sub connection to one Redis server. It reconnects whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

PING_S = 5.0
"""Interval of PINGs on a connection whose channels do not change. After two intervals without any reply or message,
the connection is replaced."""
BACKOFF_S = (0.05, 2.0)
"""First and longest delay before a reconnect."""
MESSAGES_PER_YIELD = 64
"""Number of messages that are dispatched before other tasks of the event loop may run."""
READ_BYTES = 64 * 1024


class PubSubConnection:
    """A connection that is subscribed to a changing set of channels.

    Messages of a channel may be lost until its subscription is confirmed, and again after each reconnect.
    """

    def __init__(
        self,
        make_connection: Callable[[], AbstractConnection],
        on_message: Callable[[bytes, bytes], None],
        on_confirmed: Callable[[bytes], None],
    ) -> None:
        """Connect in a task of the running event loop. The callbacks may neither block nor raise.

        Args:
            make_connection: Returns a new, unconnected connection to the server.
            on_message: Called with the channel and the payload of each message.
            on_confirmed: Called with a channel when the server has confirmed its subscription, after each connect.
        """
        self._make_connection = make_connection
        self._on_message = on_message
        self._on_confirmed = on_confirmed
        self._channels: set[bytes] = set()
        self._unsent: set[bytes] = set()
        """Channels that were added or removed since the last commands."""
        self.confirmed: set[bytes] = set()
        """Channels whose subscription is confirmed."""
        self._changed = asyncio.Event()
        self._heard_s = 0.0
        """Event-loop time at which data arrived last."""
        self.task = asyncio.create_task(self._stay_connected())
        """The task that connects and reconnects. It runs until it is cancelled."""

    def __repr__(self) -> str:
        return f"<PubSubConnection channels={len(self._channels)} confirmed={len(self.confirmed)}>"

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no channel."""
        return not self._channels

    def add(self, channel: bytes) -> None:
        """Subscribe to a channel."""
        if channel in self._channels:  # then nothing has changed, and a PING stays due
            return
        self._channels.add(channel)
        self._unsent.add(channel)
        self._changed.set()

    def remove(self, channel: bytes) -> None:
        """Unsubscribe from a channel."""
        self._channels.discard(channel)
        self._unsent.add(channel)
        self._changed.set()

    async def _stay_connected(self) -> None:
        delay_s = BACKOFF_S[0]
        is_lost = False
        while True:
            connection = self._make_connection()
            try:
                await self._serve(connection)
            except* Exception as errors:  # after any error of a connection, a new connection replaces it
                error = errors.exceptions[0]
                if not isinstance(error, RedisError | OSError):
                    log.exception("subscriber.connection_failed", exc_info=error)
                is_lost = is_lost and not self.confirmed
                log.log(logging.DEBUG if is_lost else logging.WARNING, "subscriber.disconnected error=%s", error)
                is_lost = True  # until a subscription is confirmed: an outage is one warning
                delay_s = BACKOFF_S[0] if self.confirmed else min(2 * delay_s, BACKOFF_S[1])
            finally:
                self.confirmed.clear()
                await connection.disconnect(nowait=True)
            await asyncio.sleep(delay_s)

    async def _serve(self, connection: AbstractConnection) -> None:
        await connection.connect()  # type: ignore[no-untyped-call]
        connection.socket_timeout = 2 * PING_S  # limits sends only: `_receive` has no timeout
        self._heard_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_subscribed(connection))
            tasks.create_task(self._receive(connection))

    async def _keep_subscribed(self, connection: AbstractConnection) -> None:
        """Subscribe and unsubscribe as the set of channels changes, and send PINGs when it does not change."""
        subscribed: set[bytes] = set()
        self._unsent |= self._channels
        while True:
            self._changed.clear()
            changed, self._unsent = self._unsent, set()
            added = (changed & self._channels) - subscribed
            removed = (changed - self._channels) & subscribed
            subscribed |= added
            subscribed -= removed
            # Channels are removed here, before the server replies: if one is added again, it needs a new confirmation.
            self.confirmed -= removed
            await self._send(connection, "SUBSCRIBE", added)
            await self._send(connection, "UNSUBSCRIBE", removed)
            try:
                async with asyncio.timeout(PING_S):
                    await self._changed.wait()
            except TimeoutError:
                await self._send(connection, "PING", (b"",))
            if asyncio.get_running_loop().time() - self._heard_s > 2 * PING_S:
                raise RedisConnectionError(f"no reply and no message for {2 * PING_S} s")

    async def _send(self, connection: AbstractConnection, command: str, args: Iterable[bytes]) -> None:
        words = list(args)
        if not words:
            return
        if not connection.is_connected:  # `send_command` would reconnect without the other channels
            raise RedisConnectionError("the connection is closed")
        await connection.send_command(command, *words, check_health=False)

    async def _receive(self, connection: AbstractConnection) -> None:
        """Read and dispatch messages.

        All messages of one read are parsed together, because redis-py's `read_response` takes longer for one message
        than all other work of a client with this message.
        """
        reader = connection._reader  # redis-py has no public way to read more than one reply
        if reader is None:
            raise RedisConnectionError("the connection is closed")
        clock = asyncio.get_running_loop().time
        parser = hiredis.Reader(protocolError=RedisConnectionError, notEnoughData=None)
        n_dispatched = 0
        while data := await reader.read(READ_BYTES):
            self._heard_s = clock()
            parser.feed(data)
            while (message := parser.gets()) is not None:
                self._dispatch(message)
                n_dispatched += 1
                if n_dispatched % MESSAGES_PER_YIELD == 0:
                    await asyncio.sleep(0)
        raise RedisConnectionError("the server closed the connection")

    def _dispatch(self, message: Any) -> None:
        if type(message) is not list or len(message) != 3:
            if isinstance(message, hiredis.ReplyError):
                raise RedisConnectionError(f"the server refused a command: {message}")
            return  # a reply to PING
        kind, channel, payload = message
        if kind == b"message":
            self._on_message(channel, payload)
        elif kind == b"subscribe" and channel in self._channels:
            self.confirmed.add(channel)
            self._on_confirmed(channel)
