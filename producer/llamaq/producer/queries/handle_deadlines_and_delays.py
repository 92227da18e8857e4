"""Ends jobs whose deadline has passed, and moves delayed jobs that are due into their queue.

A client calls this before it counts or lists jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import ResponseError

from llamaq.common.protocol.end_expired_jobs import MAX_DUE, end_expired
from llamaq.common.redis.connect import NotTheMaster
from llamaq.producer.queue_connection import QueueConnection

log = logging.getLogger(__name__)

MAX_SEARCHES = 20
"""Upper bound on the searches in each partition, so that a call does not take long if many jobs are due."""
LONGEST_S = 5.0
"""How long a call tries to write. With Sentinels and a cluster, refused writes are retried for longer."""


@asynccontextmanager
async def optional_writes() -> AsyncIterator[None]:
    """Let a call that reads also write, unless the server refuses writes."""
    try:
        async with asyncio.timeout(LONGEST_S):
            yield
    except (ResponseError, NotTheMaster, TimeoutError) as exc:
        log.debug("client.write_refused error=%s", exc)


async def handle_due(connection: QueueConnection, queue: str, partitions: int) -> None:
    """End jobs of the queue that have reached a deadline, and add the entries of delayed jobs that are due.

    If the server refuses writes, for example because it is a replica, nothing is changed, and the jobs are counted as
    they are stored.

    Raises:
        RedisError: A partition did not answer.
    """
    await asyncio.gather(*(_handle_due(connection, queue, partition) for partition in range(partitions)))


async def _handle_due(connection: QueueConnection, queue: str, partition: int) -> None:
    redis, scripts, keys = connection.redis, connection.scripts, connection.keys
    async with optional_writes():
        for _ in range(MAX_SEARCHES):
            due = await scripts.due_jobs(queue, partition, MAX_DUE)
            await end_expired(redis, scripts, keys, queue, partition, due.expired)
            if max(len(due.expired), due.n_given) < MAX_DUE:
                break
