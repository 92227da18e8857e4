"""What a queue looks like now: its depth, its workers, its last jobs."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common import codec
from llamaq.common.errors import ProtocolError
from llamaq.common.keys import GROUP, Keys
from llamaq.common.messages import JobStats, Priority, QueueDepth, Worker

RECENT_JOBS = 100


async def read_depth(redis: Redis, keys: Keys, queue: str, partitions: int) -> QueueDepth:
    """Entries of all job streams: those that a worker has claimed are running, the others wait."""
    async with redis.pipeline(transaction=False) as pipe:
        for partition in range(partitions):
            for priority in Priority:
                stream = keys.jobs(queue, partition, priority)
                pipe.xlen(stream)
                pipe.xpending(stream, GROUP)
        replies = await pipe.execute(raise_on_error=False)
    total = sum(_entries(length) for length in replies[::2])
    running = sum(_pending(summary) for summary in replies[1::2])
    return QueueDepth(waiting=max(0, total - running), running=running)


def _entries(reply: Any) -> int:
    if isinstance(reply, Exception):
        raise reply
    return int(reply)


def _pending(reply: Any) -> int:
    if isinstance(reply, ResponseError) and "NOGROUP" in str(reply):
        return 0  # no worker has been here yet
    if isinstance(reply, Exception):
        raise reply
    return int(reply["pending"])


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
