"""Reads the state of a queue: its waiting jobs, its live workers, and the stats of its last finished jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.queue_and_worker_state import QueueDepth, RecentJob, Worker
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.protocol.script_source import source
from llamaq.common.redis.server_state import server_time_ms
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.producer.queries.handle_deadlines_and_delays import handle_due
from llamaq.producer.queue_connection import QueueConnection

RECENT_JOBS = 100
MAX_TENANTS = 1000
"""Number of tenants of each job stream that a depth contains."""
RATE_WINDOW_S = 300.0
"""Jobs that finished longer ago than this do not count for the finish rate."""


async def read_depth(connection: QueueConnection, queue: str, partitions: int) -> QueueDepth:
    """Return the depth of a queue. Jobs that have reached a deadline are ended first, so that they do not count.

    Raises:
        RedisError: A partition did not answer.
    """
    await handle_due(connection, queue, partitions)
    return await queue_depth(connection.redis, connection.keys, queue, partitions, max_tenants=MAX_TENANTS)


async def oldest_waiting_s(connection: QueueConnection, queue: str, partitions: int) -> float | None:
    """Return for how many seconds the oldest waiting job has waited since its submit, or since it was due.

    Returns:
        The seconds. None: no job waits.

    Raises:
        RedisError: A partition did not answer.
    """
    oldest, keys = connection.redis.register_script(source("oldest")), connection.keys

    async def search(partition: int) -> int:
        streams = [keys.jobs(queue, partition, priority) for priority in Priority]
        reply: Any = await oldest(keys=[keys.later(queue, partition), *streams], args=[GROUP])
        return int(reply)

    longest_ms = max(await asyncio.gather(*map(search, range(partitions))))
    return None if longest_ms < 0 else longest_ms / 1000


async def read_workers(connection: QueueConnection, queue: str) -> tuple[Worker, ...]:
    """Return the workers whose heartbeat has not expired, sorted by id.

    A worker whose heartbeat another client has overwritten is left out.
    """
    redis, keys = connection.redis, connection.keys
    members: Any = await redis.zrange(keys.workers(queue), 0, -1)
    if not members:
        return ()
    async with redis.pipeline(transaction=False) as pipe:
        for member in members:
            pipe.hget(keys.worker(member.decode(errors="replace")), "worker")
        replies = await pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, RedisError) and not is_job_key_error(reply):
            raise reply
    found = [_decode_worker(data) for data in replies if isinstance(data, bytes)]
    return tuple(sorted((worker for worker in found if worker is not None), key=lambda worker: worker.card.worker))


def _decode_worker(data: bytes) -> Worker | None:
    try:
        return codec.decode_model(Worker, data)
    except ProtocolError:
        return None  # a worker of an incompatible version


async def read_recent(connection: QueueConnection, queue: str, since_ms: int = 0) -> tuple[RecentJob, ...]:
    """Return the last `RECENT_JOBS` jobs that ended in a worker, newest first, but none that ended before `since_ms`.

    The ids of the stats stream are the times of the ends, by the clock of Redis.
    """
    entries: Any = await connection.redis.xrevrange(connection.keys.stats(queue), min=since_ms, count=RECENT_JOBS)
    found = [_recent_job(entry, fields) for entry, fields in entries]
    return tuple(job for job in found if job is not None)


def _recent_job(entry: bytes, fields: dict[bytes, bytes]) -> RecentJob | None:
    try:
        job = codec.decode_model(RecentJob, fields.get(b"job", b""))
    except ProtocolError:
        return None  # an incompatible version or another client has written it
    return job.model_copy(update={"ended_ms": int(entry.partition(b"-")[0])})


async def estimate_wait_s(connection: QueueConnection, queue: str, n_ahead: int) -> float | None:
    """Estimate how many seconds a job waits behind `n_ahead` others: `n_ahead` divided by the recent finish rate.

    The window contains the last `RECENT_JOBS` jobs that finished at most `RATE_WINDOW_S` ago. The rate is the number of
    these jobs minus one, divided by the time since the oldest of them finished.

    While a queue finishes no job, the estimate grows, until fewer than two jobs are in the window. The estimate is too
    low if the waiting jobs are longer than the finished ones, or if workers have ended since then.

    Returns:
        Seconds, or None if fewer than two jobs finished within the window.
    """
    now_ms = await server_time_ms(connection.redis)
    first_ms = now_ms - int(RATE_WINDOW_S * 1000)
    entries: Any = await connection.redis.xrevrange(connection.keys.stats(queue), min=first_ms, count=RECENT_JOBS)
    if len(entries) < 2:
        return None
    oldest_ms = int(entries[-1][0].partition(b"-")[0])
    return n_ahead * (now_ms - oldest_ms) / 1000 / (len(entries) - 1)
