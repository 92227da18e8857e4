"""One pub/sub connection for all streams of a client.

Pub/sub may lose messages, and it never says so. What makes it safe is that everything published also lies in the
job's event stream or hash: a listener is told to look there again whenever something may have been lost, that is
after each confirmation of its subscription (the first one, and those after a reconnect) and when a look at the job
after a second of silence shows that it has gone on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from llamaq.common.tasks import end_tasks

log = logging.getLogger(__name__)

SILENCE_S = 1.0
"""Without a message for this long, a job is looked at."""
PING_S = 20.0
"""A connection that carries nothing is asked for a sign of life this often, and given up after twice the time."""
BACKOFF_S = (0.05, 2.0)
"""The first and the longest pause before connecting again."""
LOOKS_PER_ROUND_TRIP = 500
MESSAGES_PER_TURN = 64
"""A flood of messages must not keep the event loop from everyone else."""


class Listener(Protocol):
    """Who waits for a job's events. None of these calls may block or raise."""

    channel: str
    job_key: str
    heard: float
    """Event-loop time of the last message or look."""

    def deliver(self, payload: bytes) -> None:
        """Take a message from the channel."""

    def look_again(self) -> None:
        """Messages may have been lost: read Redis, from the beginning."""

    def inform(self, status: bytes | None, generated: int) -> None:
        """Take what the job's hash says: its status (None: there is no such job) and how many tokens are stored."""


class Subscriber:
    """Hands each channel's messages to its listeners. Bound to the event loop it is first used in."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._listeners: dict[str, list[Listener]] = {}
        self._confirmed: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Subscriber channels={len(self._listeners)} confirmed={len(self._confirmed)}>"

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Deliver to this listener meanwhile; `look_again` follows as soon as the subscription stands."""
        self._join(listener)
        try:
            yield
        finally:
            self._leave(listener)

    def _join(self, listener: Listener) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(self._watch_silent())]
        listener.heard = asyncio.get_running_loop().time()
        self._listeners.setdefault(listener.channel, []).append(listener)
        if listener.channel in self._confirmed:
            listener.look_again()
        self._changed.set()

    def _leave(self, listener: Listener) -> None:
        others = self._listeners[listener.channel]
        others.remove(listener)
        if not others:
            del self._listeners[listener.channel]
            self._changed.set()

    async def aclose(self) -> None:
        """Unsubscribe everything and close the connection."""
        await end_tasks(*self._tasks)
        self._tasks = []

    async def _stay_connected(self) -> None:
        pause_s = BACKOFF_S[0]
        while True:
            connection = self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            try:
                await self._serve(connection)
            except* (RedisError, OSError) as errors:
                log.warning("subscriber.disconnected error=%s", errors.exceptions[0])
                pause_s = BACKOFF_S[0] if self._confirmed else min(2 * pause_s, BACKOFF_S[1])
            finally:
                self._confirmed.clear()
                await connection.disconnect(nowait=True)
            await asyncio.sleep(pause_s)

    async def _serve(self, connection: AbstractConnection) -> None:
        await connection.connect()  # type: ignore[no-untyped-call]
        # With a timeout redis-py sends within `asyncio.wait_for`, which before Python 3.12 may swallow the cancellation
        # that `aclose` needs. Who does not take what is sent gives no sign of life either.
        connection.socket_timeout = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_subscribed(connection))
            tasks.create_task(self._receive(connection))

    async def _keep_subscribed(self, connection: AbstractConnection) -> None:
        """Send what makes the connection's channels those that have listeners."""
        subscribed: set[str] = set()
        while True:
            self._changed.clear()
            wanted = set(self._listeners)
            await self._send(connection, "SUBSCRIBE", wanted - subscribed)
            # Forgotten before the answer comes: who joins meanwhile must wait for a confirmation of its own.
            self._confirmed &= wanted
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
        listeners = self._listeners.get(channel, ())
        if kind == b"message":
            now = asyncio.get_running_loop().time()
            for listener in listeners:
                listener.heard = now
                listener.deliver(payload)
        elif kind == b"subscribe" and listeners:
            self._confirmed.add(channel)
            for listener in listeners:
                listener.look_again()

    async def _watch_silent(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_S / 2)
            now = asyncio.get_running_loop().time()
            silent = [one for group in self._listeners.values() for one in group if now - one.heard >= SILENCE_S]
            for start in range(0, len(silent), LOOKS_PER_ROUND_TRIP):
                try:
                    await self._look_at(silent[start : start + LOOKS_PER_ROUND_TRIP])
                except (RedisError, OSError) as exc:
                    log.warning("subscriber.look_failed error=%s", exc)

    async def _look_at(self, listeners: list[Listener]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for listener in listeners:
                pipe.hmget(listener.job_key, "status", "generated")
            replies = await pipe.execute()
        now = asyncio.get_running_loop().time()
        for listener, (status, generated) in zip(listeners, replies, strict=True):
            listener.heard = now
            listener.inform(status, int(generated or 0))
