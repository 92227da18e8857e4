"""The objects that all calls of one client share: settings, Redis connections and subscriber."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from redis.asyncio import Redis

from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.redis.connect import connect
from llamaq.common.settings import ClientSettings
from llamaq.producer.argument_checks import check_seconds
from llamaq.producer.open_calls import OpenCalls
from llamaq.producer.streaming.subscriber import Subscriber
from llamaq.producer.worker_watch import WorkerWatch

MAX_BLOCKING_READS = 8
"""Connections that may wait in Redis for replies of workers. The others of the pool are free for submits."""


@dataclass(frozen=True, slots=True)
class LoopConnections:
    """The connections of one client to Redis within one event loop."""

    redis: Redis
    scripts: JobScripts
    subscriber: Subscriber
    workers: WorkerWatch
    blocking_reads: asyncio.Semaphore
    """Bounds the connections of the pool that wait in Redis for replies of workers."""
    calls: OpenCalls
    """What uses the connections."""

    @classmethod
    def of(cls, settings: ClientSettings, keys: Keys) -> LoopConnections:
        """Return connections with these settings. Redis is contacted by the first call that needs it."""
        redis = connect(settings.redis_url, name="llamaq-client")
        workers = WorkerWatch(redis, keys, require_worker=settings.require_worker)
        scripts = JobScripts(redis, keys)
        blocking_reads = asyncio.Semaphore(MAX_BLOCKING_READS)
        return cls(redis, scripts, Subscriber(redis, scripts.expire), workers, blocking_reads, OpenCalls())


class QueueConnection:
    """The connection of one client to Redis, and its settings.

    Connections belong to the event loop that used them first. When that loop is closed, the next loop gets new ones:
    `asyncio.run` and `async_to_sync` create a loop for each call. The next call after `aclose` gets new ones too.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.keys = Keys(settings.key_prefix)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that uses the connections. None: they are not used yet."""
        self._connections = LoopConnections.of(settings, self.keys)

    def __repr__(self) -> str:
        """Return the state of the subscriber, without the state of the connections."""
        return repr(self._connections.subscriber)

    async def n_partitions(self) -> int:
        """Return the number of partitions that may have jobs: the stored number of the workers, at least the setting.

        So a caller that only reads or purges a queue may leave the setting out.
        """
        config = await QueueConfig.read(self.redis, self.keys, self.settings.queue, 0)
        return max(self.settings.partitions, 0 if config is None else config.partitions)

    @property
    def redis(self) -> Redis:
        """The commands of Redis. Like the other properties, it belongs to the running event loop."""
        return self._of_running_loop().redis

    @property
    def scripts(self) -> JobScripts:
        """The Lua scripts."""
        return self._of_running_loop().scripts

    @property
    def subscriber(self) -> Subscriber:
        """The subscriber of the events of jobs."""
        return self._of_running_loop().subscriber

    @property
    def workers(self) -> WorkerWatch:
        """The watch for queues without a worker."""
        return self._of_running_loop().workers

    @property
    def blocking_reads(self) -> asyncio.Semaphore:
        """Held during a command that keeps its connection to Redis until a worker replies."""
        return self._of_running_loop().blocking_reads

    @property
    def calls(self) -> OpenCalls:
        """The calls that a close ends."""
        return self._of_running_loop().calls

    def _of_running_loop(self) -> LoopConnections:
        """Return the connections of the running event loop; outside a loop, those that were used last.

        Raises:
            RuntimeError: The connections belong to another event loop, which is not closed.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._connections
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(
                    "this AsyncClient belongs to another event loop, which is not closed: create one AsyncClient in "
                    "each event loop, or use Client, which all threads and event loops may share"
                )
            if self._loop is not None:
                self._connections = LoopConnections.of(self.settings, self.keys)
            self._loop = loop
        return self._connections

    def timeout_s(self, timeout_s: float | None) -> float:
        """Return the timeout of one call: `timeout_s`, or the client's setting if `timeout_s` is None.

        Raises:
            InvalidRequest: The argument `timeout` of the call is not a number of seconds.
        """
        if timeout_s is None:
            return self.settings.timeout_s
        check_seconds("timeout", timeout_s)
        return timeout_s

    async def aclose(self) -> None:
        """Unsubscribe from all channels and close all connections of the running event loop."""
        connections = self._of_running_loop()
        try:
            await connections.workers.aclose()
            await connections.subscriber.aclose()
            await connections.redis.aclose()
        finally:
            if self._connections is connections:
                self._connections = LoopConnections.of(self.settings, self.keys)
