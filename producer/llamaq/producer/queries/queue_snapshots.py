"""Who serves a queue, and what its last jobs took."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_state import Worker
from llamaq.common.redis.server_time import server_time_ms

RECENT_JOBS = 100
RATE_WINDOW_S = 300.0
"""Jobs that ended longer ago say nothing about the present."""


async def read_workers(redis: Redis, keys: Keys, queue: str) -> tuple[Worker, ...]:
    """The workers whose heartbeat has not expired; the others are taken off the list."""
    members: Any = await redis.zrange(keys.workers(queue), 0, -1)
    ids = [member.decode() for member in members]
    if not ids:
        return ()
    async with redis.pipeline(transaction=False) as pipe:
        for worker in ids:
            pipe.hget(keys.worker(worker), "worker")
        replies = await pipe.execute()
    dead = [worker for worker, data in zip(ids, replies, strict=True) if data is None]
    if dead:
        await redis.zrem(keys.workers(queue), *dead)
    found = [_decode_worker(data) for data in replies if data is not None]
    return tuple(sorted((worker for worker in found if worker is not None), key=lambda worker: worker.card.worker))


def _decode_worker(data: bytes) -> Worker | None:
    try:
        return codec.decode_model(Worker, data)
    except ProtocolError:
        return None  # a worker of a version that this one does not understand


async def read_recent(redis: Redis, keys: Keys, queue: str) -> tuple[JobStats, ...]:
    """Stats of the jobs that ended last, newest first."""
    entries: Any = await redis.xrevrange(keys.stats(queue), count=RECENT_JOBS)
    return tuple(codec.decode_model(JobStats, fields[b"stats"]) for _, fields in entries)


async def estimate_wait(redis: Redis, keys: Keys, queue: str, n_ahead: int) -> float | None:
    """About how many seconds a job waits that has so many before it; None when fewer than two have ended lately.

    It is `n_ahead` divided by the rate at which jobs of the queue ended: of the last `RECENT_JOBS`, at most
    `RATE_WINDOW_S` ago, those after the first, by the time from that one to now. The times are the ids of the stream of
    stats, so all are by the clock of Redis. A queue that has come to a standstill shows a growing wait, and then None.
    The rate is that of the jobs that ended: if those that wait are longer, or workers have left, it is too good.
    """
    now_ms = await server_time_ms(redis)
    first_ms = int(now_ms - RATE_WINDOW_S * 1000)
    entries: Any = await redis.xrevrange(keys.stats(queue), min=first_ms, count=RECENT_JOBS)
    if len(entries) < 2:
        return None
    oldest_ms = int(entries[-1][0].partition(b"-")[0])
    return n_ahead * (now_ms - oldest_ms) / 1000 / (len(entries) - 1)
