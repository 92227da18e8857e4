"""Reads the dead letters of a queue: jobs that crashed workers, failed after their last retry or are damaged, and
stream entries that are not jobs.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from llamaq.common.errors import DeadLetterNotFound, InvalidRequest, JobNotFound, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails
from llamaq.common.protocol.keys import JobId
from llamaq.producer.queries.job_records import read_output
from llamaq.producer.queue_connection import QueueConnection

_LETTER_WITHOUT_JOB = re.compile(r"([A-Za-z0-9_\-]{1,64})\.([0-9]{1,4})\.([0-9]{1,20}-[0-9]{1,20})")
"""Id of a dead letter that is not a job. It consists of the queue, the partition and the stream entry id."""
Fields = dict[bytes, bytes]


async def read_all(
    connection: QueueConnection, queue: str, partitions: int, limit: int | None = None
) -> tuple[DeadLetter, ...]:
    """Return the newest `limit` dead letters of a queue, newest first. Without a limit, return all."""
    letters: list[DeadLetter] = []
    for partition in range(partitions):
        entries: Any = await connection.redis.xrevrange(connection.keys.dead(queue, partition), count=limit)
        letters += [_letter(queue, partition, entry, fields) for entry, fields in entries]
    return tuple(sorted(letters, key=lambda letter: letter.dead_ms, reverse=True)[:limit])


async def count_all(connection: QueueConnection, queue: str, partitions: int) -> int:
    """Return the number of dead letters of a queue."""
    return sum([await connection.redis.xlen(connection.keys.dead(queue, partition)) for partition in range(partitions)])


async def read_details(connection: QueueConnection, letter_id: str) -> DeadLetterDetails:
    """Return one dead letter, with its request and its output unless they have expired.

    Raises:
        DeadLetterNotFound: No dead letter has this id.
        InvalidRequest: `letter_id` does not have the form of a dead letter's id.
    """
    queue, partition, entry, fields = await _find_entry(connection, letter_id)
    summary = _letter(queue, partition, entry, fields).model_dump()
    if summary["job_id"] is None:
        return DeadLetterDetails(**summary, held=_text(fields, b"held"))
    request: JobRequest | None = None
    output = TokenSpan(0, (), 0, "")
    try:
        request = await read_request(connection, summary["job_id"])
        output = await read_output(connection.redis, connection.keys.of_job(summary["job_id"]))
    except (JobNotFound, InvalidRequest, ProtocolError):
        pass  # the job has expired, or its keys were overwritten
    return DeadLetterDetails(**summary, request=request, text=output.text, tokens=output.tokens)


async def read_request(connection: QueueConnection, job_id: str) -> JobRequest:
    """Return the request of a job.

    Raises:
        JobNotFound: The job has expired.
        InvalidRequest: The stored request is damaged.
    """
    payload: Any = await connection.redis.hget(connection.keys.of_job(job_id).job, "request")
    if payload is None:
        raise JobNotFound(job_id)
    return codec.decode_request(payload, codec.MAX_EVENT_BYTES)


async def find(connection: QueueConnection, letter_id: str) -> tuple[str, DeadLetter]:
    """Return the name of a dead letter's queue, and the dead letter.

    Raises:
        DeadLetterNotFound: No dead letter has this id.
        InvalidRequest: `letter_id` does not have the form of a dead letter's id.
    """
    queue, partition, entry, fields = await _find_entry(connection, letter_id)
    return queue, _letter(queue, partition, entry, fields)


def id_of_retry(letter: DeadLetter, job_id: JobId) -> JobId:
    """Return the id of the job that a retry submits. All retries of a letter get the same id, so they submit only one
    job.
    """
    # The text that is hashed is part of the protocol: clients of other versions must compute the same id.
    digest = hashlib.sha256(f"retry of {job_id}, dead as {letter.entry}".encode()).hexdigest()
    return JobId(job_id.queue, job_id.partition, digest[:32])


async def _find_entry(connection: QueueConnection, letter_id: str) -> tuple[str, int, bytes, Fields]:
    """Return the queue and the partition of a dead letter, and the id and fields of its stream entry."""
    redis, keys = connection.redis, connection.keys
    if match := _LETTER_WITHOUT_JOB.fullmatch(str(letter_id)):
        queue, partition = match[1], int(match[2])
        matching: Any = await redis.xrange(keys.dead(queue, partition), min=match[3], max=match[3])
    else:
        job_id = JobId.parse(letter_id)
        queue, partition = job_id.queue, job_id.partition
        entries: Any = await redis.xrevrange(keys.dead(queue, partition))
        matching = [(entry, fields) for entry, fields in entries if fields.get(b"job") == letter_id.encode()]
    if not matching:
        raise DeadLetterNotFound(letter_id)
    entry, fields = matching[0]
    return queue, partition, entry, fields


def _letter(queue: str, partition: int, entry: bytes, fields: Fields) -> DeadLetter:
    entry_id = entry.decode()
    job_id = _text(fields, b"job") or None
    return DeadLetter(
        id=job_id or f"{queue}.{partition}.{entry_id}",
        job_id=job_id,
        reason=_text(fields, b"reason"),
        workers=tuple(_text(fields, b"workers").split()),
        dead_ms=int(entry_id.partition("-")[0]),
        partition=partition,
        entry=entry_id,
    )


def _text(fields: Fields, name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")
