"""Who serves a queue, and what its last jobs took."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from llamaq.common import codec
from llamaq.common.errors import ProtocolError
from llamaq.common.keys import Keys
from llamaq.common.messages import JobStats, Worker

RECENT_JOBS = 100


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
