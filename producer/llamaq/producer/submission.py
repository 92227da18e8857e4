"""Puts jobs into the queue."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Sized
from contextlib import suppress
from math import inf
from typing import Any

from redis.exceptions import RedisError, ResponseError

from llamaq.common.errors import (
    IdempotencyConflict,
    InvalidRequest,
    InvalidSettings,
    OtherKindOfQueue,
    QueueDraining,
    QueueFull,
    RedisFull,
)
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import (
    OtherKind,
    OtherPartitions,
    Submission,
    SubmitConflict,
    SubmitDraining,
    SubmitQueueFull,
    SubmitReply,
    Submitted,
)
from llamaq.common.redis.write_refusals import is_full
from llamaq.producer.call_timeout import CallTimeout
from llamaq.producer.durability import check_durable, confirm
from llamaq.producer.job_handle import AsyncJob
from llamaq.producer.option_synonyms import translate
from llamaq.producer.queries import dead_letters
from llamaq.producer.queries.queue_snapshots import estimate_wait_s
from llamaq.producer.queue_connection import QueueConnection

log = logging.getLogger(__name__)

LONG_PROMPT_TOKENS = 10_000
"""Prompts of more token ids are validated and encoded in a thread, so that the event loop continues meanwhile."""
SEED_BITS = 53
"""A JSON number keeps integers of up to 53 bits exactly, in any language."""


async def build_request(options: JobOptions, **values: Any) -> JobRequest:
    """Return the validated request. A missing seed is drawn here, so that every attempt of the job has the same seed.

    A long prompt of token ids is validated in a thread, because that takes up to a second.

    Args:
        options: The caller's job options. They replace `values` of the same name.
        **values: The prompt (text, token ids or messages), and default values of options.

    Raises:
        InvalidRequest: A value is out of its bounds, or there is not exactly one prompt.
    """
    merged = translate({**values, **options})
    if "seed" not in merged:
        merged |= {"seed": secrets.randbits(SEED_BITS), "has_random_seed": True}
    if "traceparent" not in merged:
        merged["traceparent"] = current_traceparent()
    if _is_long(merged.get("tokens")):
        return await asyncio.to_thread(codec.build_request, merged)
    return codec.build_request(merged)


def current_traceparent() -> str | None:
    """Return the current span of OpenTelemetry in the form of W3C Trace Context. None: there is no span.

    OpenTelemetry is not imported here, because an application that has not imported it has no span.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _is_long(tokens: object) -> bool:
    return isinstance(tokens, Sized) and len(tokens) > LONG_PROMPT_TOKENS


def new_job_id(connection: QueueConnection, request: JobRequest) -> JobId:
    """Return the id for a new job in the client's queue."""
    return JobId.new(connection.settings.queue, connection.settings.partitions, request.idempotency_key)


async def submit(
    connection: QueueConnection, request: JobRequest, job_id: JobId | None = None, *, durable: int = 0
) -> AsyncJob:
    """Put a job into the queue and return its handle.

    Args:
        connection: The client's connection. Its settings name the queue.
        request: The validated request.
        job_id: Id and queue of the job. None: a new id in the client's queue.
        durable: Number of replicas that must confirm the job.

    Raises:
        NoWorker: The client has `require_worker`, and no worker serves the queue.
        NotDurable: Too few replicas have confirmed the job, which was submitted.
        ResultTimeout: Redis has not answered within the client's `timeout_s`. It may have the job.
        LlamaqError: The same errors as `send`.
    """
    check_durable(durable)
    job_id = job_id or new_job_id(connection, request)
    limit = CallTimeout(connection.settings.timeout_s)
    await require_worker(connection, job_id, limit)
    problem = "could not be submitted: Redis has not answered"
    job = await limit.bound(send(connection, request, job_id), str(job_id), problem)
    if durable:
        problem = "was submitted, but Redis has not said which replicas have it"
        await limit.bound(confirm(connection, [job.id], durable), job.id, problem)
    return job


async def require_worker(connection: QueueConnection, job_id: JobId, limit: CallTimeout) -> None:
    """Search for a worker of the queue before a job is submitted, if the client has `require_worker`.

    Raises:
        NoWorker: No worker serves the queue.
        ResultTimeout: Redis has not answered in time.
    """
    if connection.settings.require_worker:
        problem = "was not submitted: Redis has not answered the search for a worker"
        await limit.bound(connection.workers.require(job_id.queue), str(job_id), problem)


async def send(
    connection: QueueConnection, request: JobRequest, job_id: JobId, *, result_ttl_s: float = inf
) -> AsyncJob:
    """Put a job into the queue like `submit`, without a bound on the time.

    Args:
        connection: The client's connection.
        request: The validated request.
        job_id: The id of the job.
        result_ttl_s: How long Redis stores the result in seconds, if this is shorter than the client's `result_ttl_s`.

    Raises:
        InvalidRequest: The encoded request is larger than `max_request_bytes`.
        InvalidSettings: The workers of the queue have another number of partitions.
        OtherKindOfQueue: The workers of the queue run jobs of another kind.
        IdempotencyConflict: A job with the same idempotency key has another request.
        QueueFull: The queue has `max_queue` waiting jobs.
        QueueDraining: The queue accepts no jobs until it is resumed.
        RedisFull: Redis has reached its `maxmemory`.
    """
    submission = await make_submission(connection, request, job_id, result_ttl_s=result_ttl_s)
    outcome: SubmitReply | RedisError
    try:
        outcome = await connection.scripts.submit(submission)
    except ResponseError as exc:
        outcome = exc
    wait_s = None
    if isinstance(outcome, SubmitQueueFull):
        wait_s = await estimate_queue_wait_s(connection, job_id.queue, outcome.depth)
    return job_of(connection, submission, outcome, wait_s)


async def make_submission(
    connection: QueueConnection, request: JobRequest, job_id: JobId, *, result_ttl_s: float = inf
) -> Submission:
    """Return the submission of a validated request, with the settings of the client. A long prompt is encoded in a
    thread.

    Args:
        connection: The client's connection.
        request: The request. If it has no tenant, it gets that of the client.
        job_id: The id of the job.
        result_ttl_s: How long Redis stores the result in seconds, if this is shorter than the client's `result_ttl_s`.

    Raises:
        InvalidRequest: The encoded request is larger than `max_request_bytes`.
    """
    settings = connection.settings
    if settings.tenant is not None and not request.tenant:
        request = request.model_copy(update={"tenant": settings.tenant})
    if _is_long(request.tokens):
        payload = await asyncio.to_thread(codec.encode_request, request, settings.max_request_bytes)
    else:
        payload = codec.encode_request(request, settings.max_request_bytes)
    return Submission(
        job_id,
        request,
        payload,
        result_ttl_s=min(result_ttl_s, settings.result_ttl_s),
        event_ttl_s=settings.event_ttl_s,
        partitions=settings.partitions if job_id.queue == settings.queue else 0,
    )


def job_of(
    connection: QueueConnection, submission: Submission, outcome: SubmitReply | RedisError, wait_s: float | None
) -> AsyncJob:
    """Return the handle of a submitted job.

    Args:
        connection: The client's connection.
        submission: The job.
        outcome: The reply of Redis, or its error.
        wait_s: Estimated wait in a full queue, in seconds.

    Raises:
        LlamaqError: The job was not submitted, see `send`.
        RedisError: The job was not submitted for another reason.
    """
    queue, settings = submission.job_id.queue, connection.settings
    match outcome:
        case Submitted():
            log.debug("job.submitted id=%s existing=%s", outcome.job_id, outcome.existing)
            is_shared = submission.request.idempotency_key is not None
            return AsyncJob(connection, outcome.job_id, is_new=not outcome.existing, is_shared=is_shared)
        case SubmitQueueFull():
            raise QueueFull(queue, outcome.depth, outcome.max_queue, wait_s)
        case SubmitDraining():
            raise QueueDraining(queue)
        case SubmitConflict():
            raise IdempotencyConflict(outcome.job_id)
        case OtherPartitions():
            raise InvalidSettings(
                f"partitions (LLAMAQ_PARTITIONS): this client has {settings.partitions}, but the workers of queue "
                f"{queue!r} have {outcome.partitions}. Use the same number"
            )
        case OtherKind():
            raise OtherKindOfQueue(queue, outcome.kind, submission.request.kind)
        case ResponseError() if is_full(outcome):
            raise RedisFull(queue) from outcome
    raise outcome


async def retry_dead_letter(connection: QueueConnection, letter_id: str) -> AsyncJob:
    """Submit the job of a dead letter as a new job and remove the letter. See `AsyncClient.retry_dead_letter`."""
    queue, letter = await dead_letters.find(connection, letter_id)
    if letter.job_id is None:
        raise InvalidRequest(f"{letter.id} is not a job ({letter.reason}): it cannot be retried, only purged")
    request = await dead_letters.read_request(connection, letter.job_id)
    new_id = dead_letters.id_of_retry(letter, JobId.parse(letter.job_id))
    at_once = request.model_copy(update={"idempotency_key": None, "delay_s": None, "run_at": None})
    job = await submit(connection, at_once, new_id)
    await connection.scripts.purge(queue, letter.partition, letter.entry, letter.job_id)
    return job


async def estimate_queue_wait_s(connection: QueueConnection, queue: str, depth: int) -> float | None:
    """Estimate how long a job waits behind `depth` jobs of its partition, if all partitions have the same depth."""
    n_ahead = depth * connection.settings.partitions
    with suppress(RedisError, OSError):  # the caller gets QueueFull without an estimate
        return await estimate_wait_s(connection, queue, n_ahead)
    return None
