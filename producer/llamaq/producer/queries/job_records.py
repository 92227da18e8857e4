"""Reads a job's hash and event stream into a `JobStatus` or a `Result`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from llamaq.common.errors import JobFailed, JobNotFound, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, TokenSpan
from llamaq.common.protocol.job_outcome import FinishReason, JobState, Result, TokenLogprobs
from llamaq.common.protocol.job_status import JobStatus
from llamaq.common.protocol.keys import JobKeys
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer.queries.handle_deadlines_and_delays import optional_writes
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.job_end import END_FIELDS, decode_end, decode_error, decode_output
from llamaq.producer.streaming.job_state import STATE_FIELDS, read_state
from llamaq.producer.streaming.output_position import OutputPosition

_STATUS_FIELDS = (
    "status", "attempt", "crashes", "worker", "generated", "submitted_ms", "started_ms", "finished_ms", "cancel",
    "finish_reason", "error", "run_at_ms", "retries_left", "retry_error",
)  # fmt: skip

RESULT_FIELDS = (*END_FIELDS, "returned", "output")
"""The fields of the hash that `result_of` needs."""


async def read_status(connection: QueueConnection, job_id: str) -> JobStatus:
    """Return a snapshot of a job. First the job is ended if it has reached a deadline, or gets its entry if it is due.

    Raises:
        JobNotFound: The id is wrong, or the result has expired.
        ProtocolError: Another client has damaged the hash of the job.
    """
    redis, keys = connection.redis, connection.keys.of_job(job_id)
    values: Any = await redis.hmget(keys.job, *_STATUS_FIELDS, *STATE_FIELDS)
    due_ms = read_state(values[len(_STATUS_FIELDS) :]).due_ms
    if due_ms is not None and due_ms <= await server_time_ms(redis):
        async with optional_writes():  # otherwise the job is reported as it is stored
            await connection.scripts.expire(job_id)
            values = await redis.hmget(keys.job, *_STATUS_FIELDS)
    try:
        return _status(job_id, values[: len(_STATUS_FIELDS)])
    except ValueError as exc:
        raise ProtocolError(f"the job's hash is damaged: {exc}") from exc


def _status(job_id: str, values: Sequence[bytes | None]) -> JobStatus:
    fields = {name: value for name, value in zip(_STATUS_FIELDS, values, strict=True) if value is not None}
    if "status" not in fields:
        raise JobNotFound(job_id)
    text = {name: fields[name].decode() for name in fields if name not in ("error", "retry_error")}
    return JobStatus(
        job_id=job_id,
        state=JobState(text["status"]),
        attempt=int(text.get("attempt", 0)),
        crashes=int(text.get("crashes", 0)),
        worker=text.get("worker"),
        generated_tokens=int(text.get("generated", 0)),
        submitted_ms=_int_or_none(text.get("submitted_ms")),
        started_ms=_int_or_none(text.get("started_ms")),
        finished_ms=_int_or_none(text.get("finished_ms")),
        cancel_requested="cancel" in text,
        finish_reason=FinishReason(text["finish_reason"]) if "finish_reason" in text else None,
        error=decode_error(fields["error"]) if "error" in fields else None,
        run_at_ms=_int_or_none(text.get("run_at_ms")),
        retries_left=_int_or_none(text.get("retries_left")),
        last_error=decode_error(fields["retry_error"]) if "retry_error" in fields else None,
    )


async def read_result(redis: Redis, keys: JobKeys, job_id: str) -> Result:
    """Return the result of a finished job.

    Raises:
        JobNotFound: The id is wrong, or the result has expired.
        JobFailed: The job failed.
    """
    values: Any = await redis.hmget(keys.job, *RESULT_FIELDS)
    return await result_of(redis, keys, job_id, values)


async def result_of(redis: Redis, keys: JobKeys, job_id: str, values: Sequence[bytes | None]) -> Result:
    """Return the result of a finished job whose hash was read.

    Args:
        redis: Connections to Redis, for the output of a job that no worker ended.
        keys: The keys of the job.
        job_id: The id of the job.
        values: The values of `RESULT_FIELDS`.

    Raises:
        JobNotFound: The job has not ended, or its result has expired.
        JobFailed: The job failed.
    """
    *end_values, returned, output = values
    end = decode_end(end_values)
    if end is None:
        raise JobNotFound(job_id)
    if isinstance(end, Failed):
        raise JobFailed(end.code, end.message, job_id)
    whole = await read_output(redis, keys) if output is None else await decode_output(output)
    seed, metadata = codec.decode_returned(returned or b"")
    return Result(
        job_id=job_id,
        text=whole.text,
        tokens=whole.tokens,
        logprobs=whole.logprobs or None,
        prompt_logprobs=whole.prompt_logprobs,
        tag_offsets=whole.tag_offsets,
        embeddings=codec.decode_embeddings(output) if output is not None and end.stats.mode == "embed" else None,
        finish_reason=end.finish_reason,
        stats=end.stats,
        seed=seed if end.stats.seed is None else end.stats.seed,
        metadata=metadata,
    )


async def read_output(redis: Redis, keys: JobKeys) -> TokenSpan:
    """Return the whole output of a job that has ended.

    If no worker ended the job, for example because it was cancelled between two attempts, the event stream is the only
    record of the output. If it was damaged, the output up to the first missing token is returned.
    """
    output: Any = await redis.hget(keys.job, "output")
    if output is not None:
        return await decode_output(output)
    position = OutputPosition()
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    tag_offsets: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None
    entries: Any = await redis.xrange(keys.events)
    for _, fields in entries:
        event = codec.decode_streamed(fields.get(b"e", b""))
        if not isinstance(event, TokenSpan):
            continue
        if position.is_before(event):
            break
        new = position.advance(event)
        if new is not None:
            texts.append(new.text)
            tokens += new.tokens
            logprobs += new.logprobs
            tag_offsets += new.tag_offsets
            prompt_logprobs = new.prompt_logprobs or prompt_logprobs
    return TokenSpan(
        0,
        tuple(tokens),
        0,
        "".join(texts),
        tuple(logprobs),
        tag_offsets=tuple(tag_offsets),
        prompt_logprobs=prompt_logprobs,
    )


def _int_or_none(text: str | None) -> int | None:
    return None if text is None else int(text)
