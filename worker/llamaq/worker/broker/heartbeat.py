"""What a worker shows of itself in Redis: its card, its slots, its last tick, and the vocabulary of its model."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.protocol.queue_state import QueueDepth, Worker, WorkerCard
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.server_time import server_time_ms
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_loop import TickLoop

log = logging.getLogger(__name__)

MISSED_BEATS = 5
"""A worker that is silent for so many heartbeats is no longer listed."""
VOCAB_TTL_S = 24 * 3600
MAX_STATS = 10_000
"""Finished jobs whose stats are kept, about."""


class Heartbeat:
    """Registers a worker, keeps it listed, and takes it off the list."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        card: WorkerCard,
        vocab_blob: bytes,
        ticks: TickLoop,
        telemetry: Telemetry,
        *,
        partitions: int,
        every_s: float,
        is_alive: Callable[[], bool],
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._card = card
        self._vocab_blob = vocab_blob
        self._ticks = ticks
        self._telemetry = telemetry
        self._partitions = partitions
        self._every_s = every_s
        self._is_alive = is_alive

    async def run(self) -> None:
        """Beat until cancelled; a beat that does not reach Redis is made up by the next. A hung engine is silent."""
        trouble = OutageLog(log, "heartbeat")
        while True:
            try:
                if self._is_alive():
                    await self.beat()
                    trouble.is_over()
            except RedisError as exc:
                trouble.note(exc)
            await asyncio.sleep(self._every_s)

    async def beat(self) -> None:
        """Show the worker as it is now; raises `RedisError`."""
        with suppress(RedisError):  # a part of a cluster may be away: we live all the same
            self._ticks.queue_depth = (await self._look_at_queue()).waiting
        now_ms = await server_time_ms(self._redis)
        card, key = self._card, self._keys.worker(self._card.worker)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, "worker", codec.encode_model(self._worker(now_ms)))
            pipe.pexpire(key, max(2000, int(self._every_s * 1000 * MISSED_BEATS)))
            pipe.zadd(self._keys.workers(card.queue), {card.worker: now_ms})
            pipe.expire(self._keys.vocab(card.vocab_hash), VOCAB_TTL_S)
            has_vocab = (await pipe.execute())[-1]
        if not has_vocab:
            blob = await asyncio.to_thread(zlib.compress, self._vocab_blob, 1)
            await self._redis.set(self._keys.vocab(card.vocab_hash), blob, ex=VOCAB_TTL_S)

    async def _look_at_queue(self) -> QueueDepth:
        return await queue_depth(self._redis, self._keys, self._card.queue, self._partitions)

    def _worker(self, now_ms: int) -> Worker:
        snapshot = self._ticks.snapshot
        return Worker(
            card=self._card,
            slots=snapshot.slots,
            cache=snapshot.cache,
            last_tick=self._telemetry.last_tick,
            ticks=self._telemetry.ticks,
            jobs_done=self._telemetry.jobs_done,
            heartbeat_ms=now_ms,
            tick_age_ms=int(self._ticks.age_s * 1000),
        )

    async def record(self, stats: JobStats) -> None:
        """A job has finished: count it, and append its stats to the queue's stream of them; raises `RedisError`."""
        self._telemetry.request_done(stats)
        stream = self._keys.stats(self._card.queue)
        await self._redis.xadd(stream, {"stats": codec.encode_model(stats)}, maxlen=MAX_STATS, approximate=True)

    async def leave(self) -> None:
        """Take the worker off the list; raises `RedisError`."""
        await self._redis.zrem(self._keys.workers(self._card.queue), self._card.worker)
        await self._redis.delete(self._keys.worker(self._card.worker))
