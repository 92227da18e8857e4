"""Ends the jobs whose deadline has passed.

Workers call this several times a second, and clients before they count or list jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_script_calls import JobScripts
from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.write_refusals import is_job_key_error

log = logging.getLogger(__name__)

MAX_DUE = 100
"""Upper bound on the expired jobs, and on the delayed jobs that are due, that one search finds in a partition."""


async def end_expired(
    redis: Redis, scripts: JobScripts, keys: Keys, queue: str, partition: int, job_ids: Sequence[str]
) -> None:
    """End the jobs that `JobScripts.due_jobs` has found.

    Another client of Redis may have written an id or overwritten its job. An id without a valid job is removed from the
    deadlines of the partition.

    Raises:
        RedisError: Redis is unreachable, or refused to end a job. The other jobs have ended.
    """
    refusal: ResponseError | None = None
    for job_id in job_ids:
        try:
            if await scripts.expire(job_id) == "ended":
                log.info("job.expired id=%s", job_id)
        except (ResponseError, InvalidRequest) as exc:
            if isinstance(exc, ResponseError) and not is_job_key_error(exc):
                refusal = exc  # the fault is not in the job
                continue
            log.warning("job.cannot_expire id=%s error=%s", job_id, exc)
            await redis.zrem(keys.deadlines(queue, partition), job_id)
    if refusal is not None:
        raise refusal
