"""Delivers pub/sub messages to the listeners of a client, over one connection, or one for each node of a cluster.

Redis may lose pub/sub messages without notice. Everything that is published is also stored, in the job's event stream
or hash, so a listener rereads Redis whenever a message may be lost:

- after each confirmation of its subscription: the first one, and one after each reconnect;
- when no message arrived for `SILENCE_S`, and the job's hash then shows that the job has made progress.

In a cluster, a worker asks only the node of a job for the number of the job's subscribers. So the subscriber connects
to that node, and moves the channel to another node when the job's keys move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.redis.connect import is_cluster, make_connection, node_of
from llamaq.producer.streaming.pubsub_connection import PubSubConnection

log = logging.getLogger(__name__)

SILENCE_S = 1.0
"""A job without a message for this long is polled: its status is read from Redis."""
POLLS_PER_ROUND_TRIP = 500


class Listener(Protocol):
    """Receives the messages and the status of one job. Its methods may neither block nor raise."""

    channel: str
    job_key: str
    last_heard_s: float
    """Event-loop time of the last message or poll."""

    def deliver(self, payload: bytes) -> None:
        """Receive a message of the channel."""

    def reread(self) -> None:
        """Read the job from Redis, from the beginning, because messages may have been lost."""

    def update_status(self, status: bytes | None, n_stored_tokens: int) -> None:
        """Receive the `status` field of the job's hash (None: there is no such job) and its number of stored tokens."""


class Subscriber:
    """Delivers the messages of each channel to its listeners. It belongs to the event loop of its first use."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._listeners: dict[str, list[Listener]] = {}
        """Listeners by channel."""
        self._connections: dict[str, PubSubConnection] = {}
        """Connections by node."""
        self._nodes: dict[str, str] = {}
        """The node of each subscribed channel. A channel is missing while the nodes of the cluster are unknown."""
        self._polling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Subscriber channels={len(self._listeners)} confirmed={self.n_confirmed}>"

    @property
    def n_confirmed(self) -> int:
        """Number of channels whose subscription is confirmed."""
        return sum(len(connection.confirmed) for connection in self._connections.values())

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Deliver messages to the listener until the context exits.

        `Listener.reread` is called as soon as the subscription is confirmed.
        """
        self._add(listener)
        try:
            yield
        finally:
            self._remove(listener)

    async def aclose(self) -> None:
        """Unsubscribe from all channels and close the connections."""
        tasks = [connection.task for connection in self._connections.values()]
        await cancel_tasks(*tasks, *([self._polling] if self._polling else []))
        self._connections.clear()
        self._nodes.clear()
        self._polling = None

    def _add(self, listener: Listener) -> None:
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_silent_jobs())
        listener.last_heard_s = asyncio.get_running_loop().time()
        self._listeners.setdefault(listener.channel, []).append(listener)
        self._subscribe(listener.channel)
        connection = self._connection_of(listener.channel)
        if connection is not None and listener.channel in connection.confirmed:
            listener.reread()

    def _remove(self, listener: Listener) -> None:
        remaining = self._listeners[listener.channel]
        remaining.remove(listener)
        if not remaining:
            del self._listeners[listener.channel]
            self._unsubscribe(listener.channel)

    def _connection_of(self, channel: str) -> PubSubConnection | None:
        node = self._nodes.get(channel)
        return None if node is None else self._connections[node]

    def _subscribe(self, channel: str) -> None:
        """Subscribe to a channel at the node of its job, and at no other node."""
        node = node_of(self._redis, channel)
        if node is None or node == self._nodes.get(channel):
            return
        self._unsubscribe(channel)
        if node not in self._connections:
            self._connections[node] = PubSubConnection(
                partial(make_connection, self._redis, node), self._deliver, self._reread
            )
        self._connections[node].add(channel)
        self._nodes[channel] = node

    def _unsubscribe(self, channel: str) -> None:
        connection = self._connection_of(channel)
        if connection is not None:
            connection.remove(channel)
            del self._nodes[channel]

    def _deliver(self, channel: str, payload: bytes) -> None:
        now_s = asyncio.get_running_loop().time()
        for listener in self._listeners.get(channel, ()):
            listener.last_heard_s = now_s
            listener.deliver(payload)

    def _reread(self, channel: str) -> None:
        for listener in self._listeners.get(channel, ()):
            listener.reread()

    async def _poll_silent_jobs(self) -> None:
        """Poll jobs without messages, and move the channels of jobs whose keys have moved to another node."""
        while True:
            await asyncio.sleep(SILENCE_S / 2)
            due = self._listeners_to_poll()
            for start in range(0, len(due), POLLS_PER_ROUND_TRIP):
                try:
                    await self._poll(due[start : start + POLLS_PER_ROUND_TRIP])
                except (RedisError, OSError) as exc:
                    log.warning("subscriber.poll_failed error=%s", exc)
            if is_cluster(self._redis):
                await self._move_channels()

    def _listeners_to_poll(self) -> list[Listener]:
        now_s = asyncio.get_running_loop().time()
        listeners = [listener for group in self._listeners.values() for listener in group]
        due = [listener for listener in listeners if now_s - listener.last_heard_s >= SILENCE_S]
        if is_cluster(self._redis):  # a poll also reveals that keys have moved, so one job per hash tag is polled
            by_tag = {listener.channel.partition("}")[0]: listener for listener in listeners}
            due += [listener for listener in by_tag.values() if listener not in due]
        return due

    async def _move_channels(self) -> None:
        """Subscribe to each channel at the node that has its job now, and close connections without channels."""
        for channel in list(self._listeners):
            self._subscribe(channel)
        idle = [node for node, connection in self._connections.items() if connection.is_idle]
        await cancel_tasks(*(self._connections.pop(node).task for node in idle))

    async def _poll(self, listeners: list[Listener]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for listener in listeners:
                pipe.hmget(listener.job_key, "status", "generated")
            replies = await pipe.execute()
        now_s = asyncio.get_running_loop().time()
        for listener, (status, generated) in zip(listeners, replies, strict=True):
            listener.last_heard_s = now_s
            listener.update_status(status, int(generated or 0))
