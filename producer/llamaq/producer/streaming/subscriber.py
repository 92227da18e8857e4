"""Delivers pub/sub messages to the listeners of a client, and ends their jobs at their deadlines.

Messages come over one connection, or one for each node of a cluster.

Redis may lose pub/sub messages without notice. Everything that is published, except the progress of a prompt, is also
stored in the job's event stream or hash. So a listener rereads Redis whenever a message may be lost:

- after each confirmation of its subscription: the first one, and one after each reconnect. PINGs detect within 15 s
  that a connection no longer works;
- when a later message shows a gap;
- when no message arrived for some time, and the job's hash then shows that the job has made progress. The time is 1 s
  for a job that sends tokens, and 5 s for other jobs. It doubles with each poll without news, up to 30 s.

So the loss of the last message on a working connection is noticed within 36 s.

In a cluster, a worker asks only the node of a job for the number of the job's subscribers. So the subscriber connects
to that node, and moves the channel to another node when the job's keys move.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks, cancel_tasks
from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.script_types import ExpireCode
from llamaq.common.redis.connect import is_cluster, make_connection, node_of
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.shared_round_trips import CLOSED
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.producer.streaming.deadline_watch import DeadlineWatch
from llamaq.producer.streaming.job_listener import JobListener
from llamaq.producer.streaming.job_state import STATE_FIELDS, read_state
from llamaq.producer.streaming.poll_schedule import PollSchedule
from llamaq.producer.streaming.pubsub_connection import PubSubConnection

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""Interval at which the subscriber polls silent jobs, and checks whether keys have moved."""
POLLS_PER_ROUND_TRIP = 500


class Subscriber:
    """Delivers the messages of each channel to its listeners. It belongs to the event loop of its first use."""

    def __init__(self, redis: Redis, expire: Callable[[str], Awaitable[ExpireCode]]) -> None:
        """Create a subscriber, which connects when the first listener is added.

        Args:
            redis: Connections to Redis.
            expire: Ends a job at its deadline, or lets a delayed job wait for a slot, see `DeadlineWatch`.
        """
        self._redis = redis
        self._listeners: dict[bytes, list[JobListener]] = {}
        """Listeners by channel."""
        self._partitions: dict[bytes, dict[bytes, str]] = {}
        """Maps the hash tag of each partition to its channels, and each channel to the key of its job."""
        self._connections: dict[str, PubSubConnection] = {}
        """Connections by node."""
        self._nodes: dict[bytes, str] = {}
        """The node of each partition. A partition is missing while the nodes of the cluster are unknown."""
        self._schedule = PollSchedule()
        self._due: dict[str | None, list[JobListener]] = defaultdict(list)
        """Listeners to poll, by node. Each node has its own task, so that a silent node does not delay the others."""
        self._polls: dict[str | None, asyncio.Task[None]] = {}
        self._checking: asyncio.Task[None] | None = None
        self._ending = BackgroundTasks()
        """Tasks that cancel the reads of removed listeners, and tasks that close connections without channels."""
        self._deadlines = DeadlineWatch(redis, expire, self._poll_soon)
        self._outage = OutageLog(log, "subscriber")

    def __repr__(self) -> str:
        return f"<Subscriber channels={len(self._listeners)} confirmed={self.n_confirmed}>"

    @property
    def n_confirmed(self) -> int:
        """Number of channels whose subscription is confirmed."""
        return sum(len(connection.confirmed) for connection in self._connections.values())

    @contextmanager
    def listening(self, listener: JobListener) -> Iterator[None]:
        """Deliver messages to the listener until the context exits.

        `JobListener.reread` is called as soon as the subscription is confirmed.
        """
        self._add(listener)
        try:
            yield
        finally:
            self._remove(listener)

    async def aclose(self) -> None:
        """Unsubscribe from all channels and close the connections. Calls that still listen raise `RuntimeError`."""
        tasks = [connection.task for connection in self._connections.values()]
        await cancel_tasks(*tasks, *self._polls.values(), *([self._checking] if self._checking else []))
        await self._deadlines.aclose()
        for listener in list(chain.from_iterable(self._listeners.values())):
            listener.fail(RuntimeError(CLOSED))
        await self._ending.wait()
        self._connections.clear()
        self._nodes.clear()
        self._checking = None

    def _add(self, listener: JobListener) -> None:
        if self._checking is None:
            self._checking = asyncio.create_task(self._check_regularly())
        self._schedule.add(listener, asyncio.get_running_loop().time())
        listener.on_deadline = partial(self._deadlines.update, listener)
        channel = listener.channel
        self._listeners.setdefault(channel, []).append(listener)
        tag = _tag_of(channel)
        self._partitions.setdefault(tag, {})[channel] = listener.keys.job
        self._connect_partition(tag)
        connection = self._connection_of(tag)
        if connection is None:
            return
        if channel in connection.confirmed:
            listener.reread()
        connection.add(channel)

    def _remove(self, listener: JobListener) -> None:
        reading = listener.close()
        if reading is not None:
            self._ending.start(cancel_tasks(reading))
        channel = listener.channel
        remaining = self._listeners[channel]
        remaining.remove(listener)
        if remaining:
            return
        del self._listeners[channel]
        tag = _tag_of(channel)
        connection = self._connection_of(tag)
        if connection is not None:
            connection.remove(channel)
        del self._partitions[tag][channel]
        if not self._partitions[tag]:
            del self._partitions[tag]
            self._nodes.pop(tag, None)

    def _connection_of(self, tag: bytes) -> PubSubConnection | None:
        node = self._nodes.get(tag)
        return None if node is None else self._connections.get(node)

    def _connect_partition(self, tag: bytes) -> None:
        """Subscribe to the channels of a partition at the node that has its keys, and at no other node."""
        channels = self._partitions[tag]
        node = node_of(self._redis, next(iter(channels.values())))
        if node is None or node == self._nodes.get(tag):
            return
        former = self._connection_of(tag)
        if node not in self._connections:
            self._connections[node] = PubSubConnection(
                partial(make_connection, self._redis, node), self._deliver, self._reread
            )
        self._nodes[tag] = node
        for channel in channels:
            if former is not None:
                former.remove(channel)
            self._connections[node].add(channel)

    def _deliver(self, channel: bytes, payload: bytes) -> None:
        now_s = asyncio.get_running_loop().time()
        for listener in self._listeners.get(channel, ()):
            listener.heard_s = now_s
            listener.deliver(payload)

    def _reread(self, channel: bytes) -> None:
        for listener in self._listeners.get(channel, ()):
            listener.reread()

    async def _check_regularly(self) -> None:
        """Poll jobs without messages, and move the channels of jobs whose keys have moved to another node."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                self._poll_due_jobs()
                if is_cluster(self._redis):
                    self._move_channels()
            except Exception:  # without this task, lost messages would stay unnoticed
                log.exception("subscriber.check_failed")

    def _poll_due_jobs(self) -> None:
        due = self._schedule.pop_due(asyncio.get_running_loop().time())
        if is_cluster(self._redis):
            # One job of each partition is polled too: the reply shows when its keys have moved to another node.
            due += [self._listeners[next(iter(channels))][0] for channels in self._partitions.values()]
        for listener in due:
            self._poll_soon(listener)
        self._deadlines.check()
        for node in [node for node in self._due if node not in self._polls]:
            self._polls[node] = asyncio.create_task(self._poll_node(node))

    def _poll_soon(self, listener: JobListener) -> None:
        self._due[self._nodes.get(_tag_of(listener.channel))].append(listener)

    def _move_channels(self) -> None:
        """Subscribe to each channel at the node that has its job now, and close connections without channels."""
        for tag in list(self._partitions):
            self._connect_partition(tag)
        idle = [node for node, connection in self._connections.items() if connection.is_idle]
        for node in idle:
            self._ending.start(cancel_tasks(self._connections.pop(node).task))

    async def _poll_node(self, node: str | None) -> None:
        """Poll the due listeners of one node."""
        try:
            listeners = self._due.pop(node)
            for start in range(0, len(listeners), POLLS_PER_ROUND_TRIP):
                await self._poll(listeners[start : start + POLLS_PER_ROUND_TRIP])
            self._outage.record_success()
        except RedisError as exc:
            self._outage.record_failure(exc)
        finally:
            del self._polls[node]

    async def _poll(self, listeners: list[JobListener]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for listener in listeners:
                pipe.hmget(listener.keys.job, *STATE_FIELDS)
            replies = await pipe.execute(raise_on_error=False)
        for listener, reply in zip(listeners, replies, strict=True):
            try:
                if isinstance(reply, Exception):
                    raise reply
                listener.update_state(read_state(reply))
            except RedisError as exc:
                if is_job_key_error(exc):
                    listener.fail(exc)
                else:
                    self._outage.record_failure(exc)
            except ProtocolError as exc:
                listener.fail(exc)


def _tag_of(channel: bytes) -> bytes:
    """Return the part of a channel's name up to its hash tag, which all keys of a partition share."""
    return channel.partition(b"}")[0]
