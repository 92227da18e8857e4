"""The dead letters of a queue: the jobs that workers died of, and the entries that were no job."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from redis.asyncio import Redis

from llamaq.common.errors import DeadLetterNotFound, InvalidRequest, JobNotFound, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.producer.queries.job_records import read_output

_ENTRY_ID = re.compile(r"([A-Za-z0-9_\-]{1,64})\.([0-9]{1,4})\.([0-9]{1,20}-[0-9]{1,20})")
Fields = dict[bytes, bytes]


async def read_all(redis: Redis, keys: Keys, queue: str, partitions: int) -> tuple[DeadLetter, ...]:
    """All dead letters of a queue, newest first."""
    letters: list[DeadLetter] = []
    for partition in range(partitions):
        entries: Any = await redis.xrevrange(keys.dead(queue, partition))
        letters += [_letter(queue, partition, entry, fields) for entry, fields in entries]
    return tuple(sorted(letters, key=lambda letter: letter.dead_ms, reverse=True))


async def read_details(redis: Redis, keys: Keys, letter_id: str) -> DeadLetterDetails:
    """One dead letter with all that is kept of it. Raises `DeadLetterNotFound`, `InvalidRequest`."""
    queue, partition, entry, fields = await _find(redis, keys, letter_id)
    summary = _letter(queue, partition, entry, fields).model_dump()
    if summary["job_id"] is None:
        return DeadLetterDetails(**summary, held=_text(fields, b"held"))
    request: JobRequest | None = None
    text = ""
    tokens: tuple[int, ...] = ()
    try:
        request = await read_request(redis, keys, summary["job_id"])
        text, tokens = await read_output(redis, keys.of_job(summary["job_id"]))
    except (JobNotFound, InvalidRequest, ProtocolError):
        pass  # it has expired, or somebody wrote over it
    return DeadLetterDetails(**summary, request=request, text=text, tokens=tokens)


async def read_request(redis: Redis, keys: Keys, job_id: str) -> JobRequest:
    """What the job asked for. Raises `JobNotFound`, `InvalidRequest`."""
    payload: Any = await redis.hget(keys.of_job(job_id).job, "request")
    if payload is None:
        raise JobNotFound(job_id)
    return codec.decode_request(payload, codec.MAX_EVENT_BYTES)


async def find(redis: Redis, keys: Keys, letter_id: str) -> tuple[str, DeadLetter]:
    """The queue of a dead letter, and the letter. Raises `DeadLetterNotFound`, `InvalidRequest`."""
    queue, partition, entry, fields = await _find(redis, keys, letter_id)
    return queue, _letter(queue, partition, entry, fields)


def id_of_retry(letter: DeadLetter, job_id: JobId) -> JobId:
    """The id of the job that does it again: always the same one, so that two who retry at once submit one job."""
    digest = hashlib.sha256(f"retry of {job_id}, dead as {letter.entry}".encode()).hexdigest()
    return JobId(job_id.queue, job_id.partition, digest[:32])


async def _find(redis: Redis, keys: Keys, letter_id: str) -> tuple[str, int, bytes, Fields]:
    if match := _ENTRY_ID.fullmatch(letter_id):
        queue, partition = match[1], int(match[2])
        entries: Any = await redis.xrange(keys.dead(queue, partition), min=match[3], max=match[3])
        wanted = entries
    else:
        job_id = JobId.parse(letter_id)
        queue, partition = job_id.queue, job_id.partition
        entries = await redis.xrevrange(keys.dead(queue, partition))
        wanted = [(entry, fields) for entry, fields in entries if fields.get(b"job") == letter_id.encode()]
    if not wanted:
        raise DeadLetterNotFound(letter_id)
    entry, fields = wanted[0]
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
