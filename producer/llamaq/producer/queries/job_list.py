"""Lists the waiting and running jobs of a queue, oldest first, and purges waiting jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

from pydantic import Field, JsonValue

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_status import JobSummary
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.wire_model import StrictModel
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer.argument_checks import check_count
from llamaq.producer.queries.handle_deadlines_and_delays import handle_due
from llamaq.producer.queue_connection import QueueConnection

PAGE = 100
"""Number of entries that are read from a job stream at once."""
REQUESTS_AT_ONCE = 10
"""Number of requests that are read at once to compare their metadata. A request may have several MiB."""

_FIELDS = (
    "status",
    "entry",
    "attempt",
    "worker",
    "generated",
    "cancel",
    "submitted_ms",
    "run_at_ms",
    "tenant",
    "priority",
)
_LISTED = (JobState.QUEUED.value.encode(), JobState.RUNNING.value.encode())


class JobFilter(StrictModel):
    """The conditions that a job must meet. None, or no metadata, stands for no condition."""

    state: JobState | None = None
    priority: Priority | None = None
    older_than_s: float | None = Field(None, ge=0, strict=True)
    """Seconds since the submit."""
    metadata: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Keys and values in the metadata of the request. A text also matches the number or boolean with this JSON text."""
    tenant: str | None = None

    @property
    def priorities(self) -> tuple[Priority, ...]:
        """The priorities whose job streams contain matching jobs."""
        return tuple(Priority) if self.priority is None else (self.priority,)

    def matches(self, job: JobSummary) -> bool:
        """Return whether a job meets the conditions that its summary shows: all except the metadata."""
        return (
            self.tenant in (None, job.tenant)
            and self.state in (None, job.state)
            and (self.older_than_s is None or job.age_s >= self.older_than_s)
        )

    def matches_metadata(self, metadata: Mapping[str, JsonValue]) -> bool:
        """Return whether this metadata has all keys and values of the filter."""
        return all(name in metadata and _is_equal(metadata[name], value) for name, value in self.metadata.items())


def build_filter(
    state: JobState | str | None,
    priority: Priority | str | None,
    older_than_s: float | None,
    metadata: Mapping[str, JsonValue] | None,
    tenant: str | None,
) -> JobFilter:
    """Return the filter with these conditions. Raises `InvalidRequest`, which names the argument that is not valid."""
    values = {"state": state, "priority": priority, "older_than_s": older_than_s, "tenant": tenant}
    return codec.build_model(JobFilter, values if metadata is None else {**values, "metadata": metadata})


def _is_equal(value: JsonValue, wanted: JsonValue) -> bool:
    return value == wanted or (isinstance(wanted, str) and not isinstance(value, str) and json.dumps(value) == wanted)


async def read_jobs(connection: QueueConnection, wanted: JobFilter, limit: int) -> tuple[JobSummary, ...]:
    """Return the oldest `limit` jobs of the queue that match the filter. See `AsyncClient.jobs`."""
    check_count("limit", limit, 1)
    if wanted.state in (JobState.FINISHED, JobState.FAILED):
        raise InvalidRequest(f"state: only queued and running jobs are in a queue, not {wanted.state} ones")
    return await read_jobs_of(connection, connection.settings.queue, await connection.n_partitions(), wanted, limit)


async def read_jobs_of(
    connection: QueueConnection, queue: str, partitions: int, wanted: JobFilter, limit: int
) -> tuple[JobSummary, ...]:
    """Return the oldest `limit` jobs of the named queue that match the filter, oldest first."""
    search = await _JobSearch.begin(connection, queue, partitions, wanted)
    found: list[JobSummary] = []
    for partition in range(partitions):
        for priority in wanted.priorities:
            found += await search.oldest(partition, priority, limit)
    return tuple(sorted(found, key=lambda job: job.submitted_ms)[:limit])


async def purge(connection: QueueConnection, wanted: JobFilter, *, dry_run: bool) -> tuple[str, ...]:
    """Cancel the waiting jobs of the queue that match the filter, and return their ids. See `AsyncClient.purge`."""
    queue, partitions = connection.settings.queue, await connection.n_partitions()
    search = await _JobSearch.begin(connection, queue, partitions, wanted)
    purged: list[str] = []
    for partition in range(partitions):
        for priority in wanted.priorities:
            async for page in search.pages(partition, priority):
                ids = [job.job_id for job in page]
                purged += ids if dry_run else await _cancel_waiting(connection, ids)
    return tuple(purged)


async def _cancel_waiting(connection: QueueConnection, job_ids: Sequence[str]) -> list[str]:
    """Cancel those of these jobs that still wait, and return their ids."""
    codes = await asyncio.gather(*(connection.scripts.cancel(job_id, only_waiting=True) for job_id in job_ids))
    return [job_id for job_id, code in zip(job_ids, codes, strict=True) if code in ("cancelled", "requested")]


class _JobSearch:
    """A search for the jobs of one queue that match a filter. Jobs submitted after its beginning are left out."""

    def __init__(self, connection: QueueConnection, queue: str, wanted: JobFilter, begun_ms: int) -> None:
        self._connection = connection
        self._queue = queue
        self._wanted = wanted
        self._begun_ms = begun_ms
        """The time of the server at the beginning."""

    @classmethod
    async def begin(cls, connection: QueueConnection, queue: str, partitions: int, wanted: JobFilter) -> Self:
        """Begin a search. First the jobs end that have reached a deadline."""
        await handle_due(connection, queue, partitions)
        return cls(connection, queue, wanted, await server_time_ms(connection.redis))

    async def oldest(self, partition: int, priority: Priority, limit: int) -> list[JobSummary]:
        """Return the first `limit` jobs of `pages`."""
        found: list[JobSummary] = []
        async for page in self.pages(partition, priority):
            found += page
            if len(found) >= limit:
                break
        return found[:limit]

    async def pages(self, partition: int, priority: Priority) -> AsyncGenerator[list[JobSummary], None]:
        """Yield the matching jobs of one priority in pages.

        First come the jobs of the job stream, by the time of their entries. This is the time of the submit, or the time
        at which a delayed job was due. Then come the jobs that are not due, in any order.
        """
        redis, keys = self._connection.redis, self._connection.keys
        stream, first = keys.jobs(self._queue, partition, priority), "-"
        while True:
            entries: Any = await redis.xrange(stream, min=first, max=str(self._begun_ms), count=PAGE)
            if not entries:
                break
            yield await self._read_page(priority, entries)
            first = f"({entries[-1][0].decode()}"
        later, cursor = keys.later(self._queue, partition), -1
        page: Any
        while cursor:
            cursor, page = await redis.zscan(later, max(cursor, 0), count=PAGE)
            if page:
                yield await self._read_page(priority, [(None, {b"id": job_id}) for job_id, _ in page])

    async def _read_page(
        self, priority: Priority, entries: Sequence[tuple[bytes | None, Mapping[bytes, bytes]]]
    ) -> list[JobSummary]:
        """Return the jobs of these entries that match the filter. Entries that are not jobs are left out.

        The id of an entry is None for a job that is not due.
        """
        redis, keys, wanted = self._connection.redis, self._connection.keys, self._wanted
        ids = {job_id: entry for entry, fields in entries if (job_id := _job_id(self._queue, fields)) is not None}
        async with redis.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hmget(keys.of_job(job_id).job, *_FIELDS)
            hashes: Any = await pipe.execute(raise_on_error=False) if ids else []
        jobs = []
        for (job_id, entry), values in zip(ids.items(), hashes, strict=True):
            if isinstance(values, Exception) or values[0] not in _LISTED or values[1] != entry:
                continue  # the job ended meanwhile, or other data replaced it
            if entry is not None or values[-1] == priority.value.encode():
                jobs.append(_summary(job_id, priority, values, self._begun_ms))
        jobs = list(filter(wanted.matches, jobs))
        return await self._with_metadata(jobs) if wanted.metadata else jobs

    async def _with_metadata(self, jobs: Sequence[JobSummary]) -> list[JobSummary]:
        """Return the jobs whose requests have the metadata of the filter."""
        redis, keys, wanted = self._connection.redis, self._connection.keys, self._wanted
        matching: list[JobSummary] = []
        for start in range(0, len(jobs), REQUESTS_AT_ONCE):
            some = jobs[start : start + REQUESTS_AT_ONCE]
            async with redis.pipeline(transaction=False) as pipe:
                for job in some:
                    pipe.hget(keys.of_job(job.job_id).job, "request")
                payloads: Any = await pipe.execute()
            pairs = zip(some, payloads, strict=True)
            matching += [job for job, data in pairs if data is not None and wanted.matches_metadata(_metadata(data))]
        return matching


def _job_id(queue: str, fields: Mapping[bytes, bytes]) -> str | None:
    """Return the job id in the fields of an entry. None: the entry is not a job of this queue."""
    text = fields.get(b"id", b"").decode(errors="replace")
    try:
        return text if JobId.parse(text).queue == queue else None
    except InvalidRequest:
        return None


def _summary(job_id: str, priority: Priority, values: Sequence[bytes | None], now_ms: int) -> JobSummary:
    status, _, attempt, worker, generated, cancel, submitted, run_at, tenant, _ = (
        value.decode(errors="replace") if value else "" for value in values
    )
    submitted_ms = _number(submitted) or 0
    return JobSummary(
        job_id=job_id,
        state=JobState(status),
        priority=priority,
        age_s=max(0, now_ms - submitted_ms) / 1000,
        submitted_ms=submitted_ms,
        run_at_ms=_number(run_at),
        attempt=_number(attempt) or 0,
        worker=worker or None,
        generated_tokens=_number(generated) or 0,
        cancel_requested=bool(cancel),
        tenant=tenant or None,
    )


def _number(text: str) -> int | None:
    """Return the number in a field. None: the field is missing, or other data replaced it."""
    try:
        return int(text)
    except ValueError:
        return None


def _metadata(request: bytes) -> Mapping[str, JsonValue]:
    try:
        return codec.decode_request(request, codec.MAX_EVENT_BYTES).metadata
    except (InvalidRequest, ProtocolError):
        return {}  # the job will fail when a worker decodes its request
