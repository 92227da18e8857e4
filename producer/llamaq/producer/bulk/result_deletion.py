"""Deletes the results of rows that are in the output file, so that a long run does not fill Redis with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redis.exceptions import RedisError

from llamaq.common.protocol.keys import JobId
from llamaq.producer.queue_connection import QueueConnection

log = logging.getLogger(__name__)


async def delete_results(connection: QueueConnection, jobs: Sequence[tuple[str, str, bool]]) -> None:
    """Delete jobs that have ended. If Redis does not answer, they stay until `result_ttl_s` is over.

    Args:
        connection: The client's connection.
        jobs: For each job its idempotency key, its id, and whether it is a dead letter, which is kept without the key.
    """
    keys, settings = connection.keys, connection.settings
    try:
        async with connection.redis.pipeline(transaction=False) as pipe:
            for key, job_id, is_dead in jobs:
                # A job that replaced another has another key, and another partition.
                first = JobId.new(settings.queue, settings.partitions, key)
                pipe.unlink(keys.idempotency(first.queue, first.partition, key))
                if not is_dead:
                    of_job = keys.of_job(job_id)
                    pipe.unlink(of_job.job, of_job.events)
            await pipe.execute()
    except (RedisError, OSError) as exc:
        log.info("bulk.results_not_deleted jobs=%d error=%s", len(jobs), exc)
