"""Waits until replicas of Redis have submitted jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.errors import NotDurable
from llamaq.common.protocol.keys import JobId
from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.shared_round_trips import Command
from llamaq.producer.argument_checks import check_count
from llamaq.producer.queue_connection import QueueConnection

REPLICA_WAIT_S = 2.0
"""How long a submit with `durable` waits for replicas. A connection to Redis waits at most 5 s for a reply."""

MAX_REPLICAS = 1000
"""Upper bound of `durable`. More replicas than that are a mistake."""


def check_durable(durable: int) -> None:
    """Check the number of replicas before anything is submitted.

    Raises:
        InvalidRequest: It is not a whole number, or it is out of its bounds.
    """
    check_count("durable", durable, 0, MAX_REPLICAS)


async def confirm(connection: QueueConnection, job_ids: Sequence[str], durable: int) -> None:
    """Wait until `durable` replicas have the submitted jobs. 0: return at once.

    Raises:
        NotDurable: Fewer replicas have confirmed it within `REPLICA_WAIT_S`.
    """
    if not durable or not job_ids:
        return
    keys, partitions = connection.keys, dict[str, list[str]]()
    for job_id in job_ids:
        parsed = JobId.parse(job_id)
        config = keys.config(parsed.queue, parsed.partition)
        partitions.setdefault(config, [config]).append(keys.of_job(job_id).job)
    confirmed = min(
        await asyncio.gather(*(_wait_for_replicas(connection.redis, each, durable) for each in partitions.values()))
    )
    if confirmed < durable:
        raise NotDurable(tuple(job_ids), confirmed, durable)


async def _wait_for_replicas(redis: Redis, keys: Sequence[str], n_replicas: int) -> int:
    """Wait until replicas have all earlier writes to the server of a partition, and return their number.

    WAIT only waits for writes of its own connection, and the earlier writes may have used another one. So this function
    writes once more, to a field of the partition's settings whose value has no meaning. `keys` are that of the settings
    and those of the jobs: while their hash slot moves, only a node that has all of them executes the write.
    """
    if not isinstance(redis, RetryingRedis):
        raise TypeError("connect() did not create this client of Redis")
    commands: list[Command] = [
        (("EVAL", "redis.call('HSET', KEYS[1], 'durable', ARGV[1])", len(keys), *keys, n_replicas), {}),
        (("WAIT", n_replicas, int(REPLICA_WAIT_S * 1000)), {}),
    ]
    written, confirmed = await redis.call_with_retry(lambda: redis.send_together(keys[0], commands))
    if isinstance(confirmed, ResponseError):
        raise confirmed
    return 0 if isinstance(written, ResponseError) else int(confirmed)
