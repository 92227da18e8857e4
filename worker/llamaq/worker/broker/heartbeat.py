"""The heartbeat: publishes the state of a worker to Redis while its engine is alive.

The published state is the worker's card, its slots, its last tick, and the vocabulary of its model.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from contextlib import suppress

from redis.exceptions import RedisError

from llamaq.common.protocol import codec
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.common.protocol.script_source import source
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.server_state import server_time_ms
from llamaq.worker.broker.heartbeat_content import describe_worker
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop

log = logging.getLogger(__name__)

MAX_MISSED_BEATS = 5
"""A worker that missed this many heartbeats is no longer listed."""
MAX_QUEUE_AGE_MS = 7 * 24 * 3600 * 1000
"""A queue without a heartbeat for this time is removed from the list of served queues."""
MIN_TTL_MS = 2000
WORKERS_TTL_S = 24 * 3600
"""The list of the workers of a queue is deleted this time after the last heartbeat."""
VOCAB_TTL_S = 24 * 3600
DEPTH_TIMEOUT_S = 1.0
"""How long the heartbeat waits for the depth of the queue. On a cluster, a partition may not answer."""


class Heartbeat:
    """Registers a worker in Redis, renews the registration, and removes it when the worker stops.

    The heartbeat also reads the depth of the queue for the engine thread.

    Threads: all methods run on the I/O thread.
    """

    def __init__(
        self,
        queue: WorkerQueue,
        card: WorkerCard,
        vocab_blob: bytes,
        ticks: TickLoop,
        shared: SharedState,
        *,
        every_s: float,
    ) -> None:
        """Create the heartbeat. `beat` publishes once, `run` publishes every `every_s` seconds.

        Args:
            queue: The queue of the worker.
            card: The id and the description of this worker.
            vocab_blob: The vocabulary of the model, uncompressed. In Redis it is stored compressed.
            ticks: The tick loop. Its slots, its KV cells and the age of its last tick are published.
            shared: The telemetry in it is published. The queue depth in it is updated.
            every_s: Seconds between two heartbeats.
        """
        self._queue = queue
        self._store_card = queue.redis.register_script(source("store_card", __package__))
        self._store_beat = queue.redis.register_script(source("store_beat", __package__))
        self._card = card
        self._vocab_blob = vocab_blob
        self._ticks = ticks
        self._shared = shared
        self._every_s = every_s

    async def run(self) -> None:
        """Send heartbeats until cancelled. No heartbeat is sent while the engine hangs."""
        outage = OutageLog(log, "heartbeat")
        while True:
            try:
                if self._ticks.liveness.is_alive:
                    await self.beat()
                    outage.record_success()
            except RedisError as exc:
                outage.record_failure(exc)
            await asyncio.sleep(self._every_s)

    async def beat(self) -> None:
        """Publish the state of the worker.

        Raises:
            RedisError: Redis is unreachable, or refused the write.
        """
        redis, keys, card = self._queue.redis, self._queue.keys, self._card
        now_ms = await server_time_ms(redis)
        state = codec.encode_model(describe_worker(card, self._ticks, self._shared.telemetry, now_ms))
        ttl_ms = max(MIN_TTL_MS, int(self._every_s * 1000 * MAX_MISSED_BEATS))
        async with redis.pipeline(transaction=False) as pipe:
            await self._store_card(keys=[keys.worker(card.worker)], args=[state, ttl_ms], client=pipe)
            await self._store_beat(keys=[keys.workers(card.queue)], args=[card.worker], client=pipe)
            pipe.expire(keys.workers(card.queue), WORKERS_TTL_S)
            await self._store_beat(keys=[keys.queues()], args=[card.queue], client=pipe)
            pipe.zremrangebyscore(keys.queues(), "-inf", now_ms - MAX_QUEUE_AGE_MS)
            pipe.expire(keys.vocab(card.vocab_hash), VOCAB_TTL_S)
            has_vocab = (await pipe.execute())[-1]
        if not has_vocab:
            blob = await asyncio.to_thread(zlib.compress, self._vocab_blob, 1)
            await redis.set(keys.vocab(card.vocab_hash), blob, ex=VOCAB_TTL_S)
        await self._read_depth()

    async def _read_depth(self) -> None:
        """Read the depth of the queue for the engine thread. If a partition does not answer, the last depth is kept."""
        with suppress(RedisError, TimeoutError):
            async with asyncio.timeout(DEPTH_TIMEOUT_S):
                depth = await self._queue.depth()
                self._shared.queue_depth.n_waiting = depth.waiting

    async def unregister(self) -> None:
        """Remove the worker from the list of workers.

        Raises:
            RedisError: Redis is unreachable, or refused the write.
        """
        redis, keys = self._queue.redis, self._queue.keys
        await redis.zrem(keys.workers(self._card.queue), self._card.worker)
        await redis.delete(keys.worker(self._card.worker))

    def __repr__(self) -> str:
        return f"<Heartbeat {self._card.worker} every {self._every_s:g} s>"
