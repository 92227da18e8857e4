"""Ends the jobs whose deadline has passed.

Workers call this several times a second, and clients before they count or list jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.common.redis.write_refusals import is_job_key_error

log = logging.getLogger(__name__)

MAX_DUE = 100
"""Upper bound on the expired jobs, and on the delayed jobs that are due, that one search finds in a partition."""


async def end_expired(
    redis: Redis, scripts: JobScripts, keys: Keys, queue: str, partition: int, expired: Sequence[bytes]
) -> None:
    """End the jobs that `JobScripts.due_jobs` has found.

    Another client of Redis may have written something else than an id, or overwritten its job. What names no valid job
    of the partition is removed from the deadlines of the partition, so that later searches do not find it again.

    Raises:
        RedisError: Redis is unreachable, or refused to end a job. The other jobs have ended.
    """
    refusal: ResponseError | None = None
    for stored in expired:
        job_id = JobId.find(stored, queue, partition)
        error: object = "not an id of a job of this partition"
        if job_id is not None:
            try:
                if await scripts.expire(str(job_id)) == "ended":
                    log.info("job.expired id=%s", job_id)
                continue
            except ResponseError as exc:
                if not is_job_key_error(exc):
                    refusal = exc  # the fault is not in the job
                    continue
                error = exc
        log.warning("job.cannot_expire id=%.200r error=%s", stored, error)
        await redis.zrem(keys.deadlines(queue, partition), stored)
    if refusal is not None:
        raise refusal
