"""The objects that all calls of one client share: settings, Redis connections and subscriber."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.script_calls import Scripts
from llamaq.common.redis.connect import connect
from llamaq.common.settings import ClientSettings
from llamaq.producer.streaming.subscriber import Subscriber
from llamaq.producer.worker_watch import WorkerWatch


@dataclass(frozen=True, slots=True)
class QueueConnection:
    """The connection of one client to Redis, and its settings."""

    settings: ClientSettings
    redis: Redis
    keys: Keys
    scripts: Scripts
    subscriber: Subscriber
    workers: WorkerWatch

    @classmethod
    def of(cls, settings: ClientSettings) -> QueueConnection:
        """Return a connection with these settings. Redis is contacted by the first call that needs it."""
        redis = connect(settings.redis_url, name="llamaq-client")
        keys = Keys(settings.key_prefix)
        workers = WorkerWatch(redis, keys, require_worker=settings.require_worker)
        scripts = Scripts(redis, keys)
        return cls(settings, redis, keys, scripts, Subscriber(redis, scripts.expire), workers)

    def timeout_s(self, timeout_s: float | None) -> float:
        """Return the timeout of one call: `timeout_s`, or the client's setting if `timeout_s` is None."""
        return self.settings.timeout_s if timeout_s is None else timeout_s

    async def aclose(self) -> None:
        """Unsubscribe from all channels and close all connections."""
        await self.workers.aclose()
        await self.subscriber.aclose()
        await self.redis.aclose()
