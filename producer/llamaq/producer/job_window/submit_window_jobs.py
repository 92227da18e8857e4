"""Submits some requests of a window in one round trip, and sorts them into accepted, refused and failed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from redis.exceptions import RedisError

from llamaq.common.errors import InvalidRequest, InvalidSettings, LlamaqError, QueueDraining, QueueFull, RedisFull
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import Submission
from llamaq.producer.job_window.window_job import WindowJob
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.retried_reads import is_temporary
from llamaq.producer.submission import make_submission, new_job_id
from llamaq.producer.submit_many import submit_each

T = TypeVar("T")


@dataclass(slots=True)
class SubmittedJobs(Generic[T]):
    """The requests of one call of `submit_jobs`, by their outcome."""

    accepted: list[WindowJob[T]] = field(default_factory=list)
    """Requests whose jobs are in the queue. Their field `handle` is set."""
    refused: list[WindowJob[T]] = field(default_factory=list)
    """Requests that may be accepted later."""
    failed: list[tuple[WindowJob[T], LlamaqError]] = field(default_factory=list)
    """Requests that will never be accepted, and why."""
    problem: str | None = None
    """Why requests were refused. None: no request was refused."""
    fatal: Exception | None = None
    """The error of a request that ends the whole window. None: there is no such error."""


async def submit_jobs(connection: QueueConnection, jobs: Sequence[WindowJob[T]]) -> SubmittedJobs[T]:
    """Submit requests. Each is accepted or refused separately. A refused request can be submitted again.

    Raises:
        RedisError: Redis refuses the whole round trip.
    """
    submitted: SubmittedJobs[T] = SubmittedJobs()
    encoded = await _encode(connection, jobs, submitted)
    if not encoded:
        return submitted
    try:
        handles, errors = await submit_each(connection, [submission for _, submission in encoded])
    except (RedisError, OSError) as exc:
        if not is_temporary(exc):
            raise
        submitted.refused = [job for job, _ in encoded]
        submitted.problem = f"Redis does not answer: {exc}"
        return submitted
    for (job, _), handle, error in zip(encoded, handles, errors, strict=True):
        if handle is not None:
            job.handle = handle
            submitted.accepted.append(job)
        elif error is not None and _passes(error):
            submitted.refused.append(job)
            submitted.problem = str(error)
        elif isinstance(error, LlamaqError) and not isinstance(error, InvalidSettings):
            submitted.failed.append((job, error))
        else:
            submitted.fatal = error
    return submitted


async def _encode(
    connection: QueueConnection, jobs: Sequence[WindowJob[T]], submitted: SubmittedJobs[T]
) -> list[tuple[WindowJob[T], Submission]]:
    """Return the requests with their submissions. A request that is too large fails."""
    encoded = []
    for job in jobs:
        request = job.submitted_request
        job_id = JobId.parse(job.job_id) if job.job_id else new_job_id(connection, request)
        try:
            encoded.append((job, await make_submission(connection, request, job_id)))
        except InvalidRequest as exc:
            submitted.failed.append((job, exc))
            continue
        job.job_id = str(job_id)
    return encoded


def _passes(error: Exception) -> bool:
    """Return whether a request that was refused with this error may be accepted later."""
    if isinstance(error, QueueFull | QueueDraining | RedisFull):
        return True
    return isinstance(error, RedisError) and is_temporary(error)
