"""Submits many jobs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.errors import BatchIncomplete, InvalidRequest, LlamaqError, NotDurable
from llamaq.common.protocol.script_types import Submission, SubmitQueueFull, SubmitReply
from llamaq.common.split_by_size import split_by_size
from llamaq.producer.argument_checks import check_list
from llamaq.producer.call_timeout import CallTimeout
from llamaq.producer.durability import check_durable, confirm
from llamaq.producer.job_handle import AsyncJob
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.submission import (
    build_request,
    estimate_queue_wait_s,
    job_of,
    make_submission,
    new_job_id,
    require_worker,
)

MAX_JOBS_AT_ONCE = 1000
"""Largest number of jobs in one round trip."""
MAX_BYTES_AT_ONCE = 16 * 1024 * 1024
"""Largest size of the encoded requests in one round trip, unless one request is larger."""
YIELD_EVERY = 50
"""After this many jobs were validated, other tasks of the event loop run."""


async def submit_many(
    connection: QueueConnection, jobs: Sequence[Mapping[str, Any]], durable: int
) -> tuple[AsyncJob, ...]:
    """Put many jobs into the queue and return their handles. See `AsyncClient.submit_many`."""
    check_durable(durable)
    check_list("jobs", jobs)
    submissions = await _validate(connection, jobs)
    if not submissions:
        return ()
    limit = CallTimeout(connection.settings.timeout_s)
    await require_worker(connection, submissions[0].job_id, limit)
    first, others = str(submissions[0].job_id), f"and {len(submissions) - 1} other jobs"
    problem = f"{others} could not be submitted: Redis has not answered"
    handles, errors = await limit.bound(submit_each(connection, submissions), first, problem)
    ids = [job.id for job in handles if job is not None]
    unconfirmed: NotDurable | None = None
    try:
        problem = f"{others} were submitted, but Redis has not said which replicas have them"
        await limit.bound(confirm(connection, ids, durable), first, problem)
    except NotDurable as exc:
        unconfirmed = exc
    if any(errors):
        raise BatchIncomplete(tuple(None if job is None else job.id for job in handles), tuple(errors)) from unconfirmed
    if unconfirmed is not None:
        raise unconfirmed
    return tuple(job for job in handles if job is not None)


async def _validate(connection: QueueConnection, jobs: Sequence[Mapping[str, Any]]) -> list[Submission]:
    """Validate and encode all jobs.

    Raises:
        InvalidRequest: A job is not valid. The message begins with its index: `jobs[3]`.
    """
    submissions = []
    for place, job in enumerate(jobs):
        if not isinstance(job, Mapping):
            raise InvalidRequest(f"jobs[{place}]: a dict with the arguments of submit is required, such as prompt")
        try:
            request = await build_request({}, **job)
            submissions.append(await make_submission(connection, request, new_job_id(connection, request)))
        except InvalidRequest as exc:
            raise InvalidRequest(f"jobs[{place}]: {exc}") from exc
        if place % YIELD_EVERY == YIELD_EVERY - 1:
            await asyncio.sleep(0)
    return submissions


async def submit_each(
    connection: QueueConnection, submissions: Sequence[Submission]
) -> tuple[list[AsyncJob | None], list[Exception | None]]:
    """Submit jobs, each separately. A repeated call with the same submissions submits no job twice.

    Returns:
        For each job its handle or None, and for each job its error or None.

    Raises:
        RedisError: Redis has not answered. It may have some of the jobs.
    """
    return await _read_outcomes(connection, submissions, await _send(connection, submissions))


async def _send(connection: QueueConnection, submissions: Sequence[Submission]) -> list[SubmitReply | RedisError]:
    outcomes: list[SubmitReply | RedisError] = []
    sizes = {"max_items": MAX_JOBS_AT_ONCE, "max_bytes": MAX_BYTES_AT_ONCE}
    for some in split_by_size(submissions, lambda one: len(one.payload), **sizes):
        outcomes += await connection.scripts.submit_many(some)
    return outcomes


async def _read_outcomes(
    connection: QueueConnection, submissions: Sequence[Submission], outcomes: Sequence[SubmitReply | RedisError]
) -> tuple[list[AsyncJob | None], list[Exception | None]]:
    """Return for each job its handle or None, and its error or None."""
    depths = [outcome.depth for outcome in outcomes if isinstance(outcome, SubmitQueueFull)]
    wait_s = await estimate_queue_wait_s(connection, connection.settings.queue, max(depths)) if depths else None
    handles: list[AsyncJob | None] = []
    errors: list[Exception | None] = []
    for submission, outcome in zip(submissions, outcomes, strict=True):
        try:
            handles.append(job_of(connection, submission, outcome, wait_s))
            errors.append(None)
        except (LlamaqError, RedisError) as exc:
            handles.append(None)
            errors.append(exc)
    return handles, errors
