"""One pub/sub connection for all streams of a client; with a cluster one to each node that has jobs of them.

Pub/sub may lose messages, and it never says so. What makes it safe is that everything published also lies in the
job's event stream or hash: a listener is told to look there again whenever something may have been lost, that is
after each confirmation of its subscription (the first one, and those after a reconnect) and when a look at the job
after a second of silence shows that it has gone on.

A cluster would pass messages on between its nodes, but a worker asks the node of a job who listens. So we listen there
too, and move when the job's keys do.
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
"""Without a message for this long, a job is looked at."""
LOOKS_PER_ROUND_TRIP = 500


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
        self._lines: dict[str, PubSubConnection] = {}
        self._places: dict[str, str] = {}
        """For each channel the node whose line carries it; none while the cluster is not known."""
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Subscriber channels={len(self._listeners)} confirmed={self.n_confirmed}>"

    @property
    def n_confirmed(self) -> int:
        """Channels whose subscription stands."""
        return sum(len(line.confirmed) for line in self._lines.values())

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Deliver to this listener meanwhile; `look_again` follows as soon as the subscription stands."""
        self._join(listener)
        try:
            yield
        finally:
            self._leave(listener)

    def _join(self, listener: Listener) -> None:
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_over())
        listener.heard = asyncio.get_running_loop().time()
        self._listeners.setdefault(listener.channel, []).append(listener)
        self._place(listener.channel)
        line = self._line_of(listener.channel)
        if line is not None and listener.channel in line.confirmed:
            listener.look_again()

    def _leave(self, listener: Listener) -> None:
        others = self._listeners[listener.channel]
        others.remove(listener)
        if not others:
            del self._listeners[listener.channel]
            self._take_off(listener.channel)

    def _line_of(self, channel: str) -> PubSubConnection | None:
        place = self._places.get(channel)
        return None if place is None else self._lines[place]

    def _place(self, channel: str) -> None:
        """See that the line to the channel's node carries it, and no other."""
        node, place = node_of(self._redis, channel), self._places.get(channel)
        if node is None or node == place:
            return
        self._take_off(channel)
        if node not in self._lines:
            self._lines[node] = PubSubConnection(
                partial(make_connection, self._redis, node), self._deliver, self._look_again
            )
        self._lines[node].add(channel)
        self._places[channel] = node

    def _take_off(self, channel: str) -> None:
        line = self._line_of(channel)
        if line is not None:
            line.remove(channel)
            del self._places[channel]

    async def aclose(self) -> None:
        """Unsubscribe everything and close the connections."""
        tasks = [line.task for line in self._lines.values()]
        await cancel_tasks(*tasks, *([self._watch] if self._watch else []))
        self._lines.clear()
        self._places.clear()
        self._watch = None

    def _deliver(self, channel: str, payload: bytes) -> None:
        now = asyncio.get_running_loop().time()
        for listener in self._listeners.get(channel, ()):
            listener.heard = now
            listener.deliver(payload)

    def _look_again(self, channel: str) -> None:
        for listener in self._listeners.get(channel, ()):
            listener.look_again()

    async def _watch_over(self) -> None:
        """Look at jobs that nothing is heard of, and follow those whose keys have moved to another node."""
        while True:
            await asyncio.sleep(SILENCE_S / 2)
            wanted = self._to_be_looked_at()
            for start in range(0, len(wanted), LOOKS_PER_ROUND_TRIP):
                try:
                    await self._look_at(wanted[start : start + LOOKS_PER_ROUND_TRIP])
                except (RedisError, OSError) as exc:
                    log.warning("subscriber.look_failed error=%s", exc)
            if is_cluster(self._redis):
                await self._follow()

    def _to_be_looked_at(self) -> list[Listener]:
        now = asyncio.get_running_loop().time()
        listeners = [one for group in self._listeners.values() for one in group]
        wanted = [one for one in listeners if now - one.heard >= SILENCE_S]
        if is_cluster(self._redis):  # a look is also how we hear that keys have moved: one for each hash tag
            by_tag = {one.channel.partition("}")[0]: one for one in listeners}
            wanted += [one for one in by_tag.values() if one not in wanted]
        return wanted

    async def _follow(self) -> None:
        for channel in list(self._listeners):
            self._place(channel)
        idle = [node for node, line in self._lines.items() if line.is_idle]
        await cancel_tasks(*(self._lines.pop(node).task for node in idle))

    async def _look_at(self, listeners: list[Listener]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for listener in listeners:
                pipe.hmget(listener.job_key, "status", "generated")
            replies = await pipe.execute()
        now = asyncio.get_running_loop().time()
        for listener, (status, generated) in zip(listeners, replies, strict=True):
            listener.heard = now
            listener.inform(status, int(generated or 0))
