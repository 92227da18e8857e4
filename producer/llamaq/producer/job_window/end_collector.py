"""Notices the ends of many jobs, and reads their results together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished, Retried
from llamaq.common.protocol.job_outcome import Result
from llamaq.producer.job_window.window_job import WindowJob
from llamaq.producer.queries.job_records import RESULT_FIELDS, result_of
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.job_end import has_ended
from llamaq.producer.streaming.job_listener import JobListener
from llamaq.producer.streaming.job_state import STATE_FIELDS, StoredState, read_state
from llamaq.producer.streaming.retried_reads import RetriedReads, is_temporary

T = TypeVar("T")

JOBS_PER_ROUND_TRIP = 100
"""Largest number of results that are read at once, because they are in memory together."""


class EndListener(JobListener):
    """Reports that a job may have ended, and leaves the read of its result to the collector."""

    is_receiving = False

    def __init__(
        self, connection: QueueConnection, job_id: str, report: Callable[[str, Exception | None], None]
    ) -> None:
        """Create a listener.

        Args:
            connection: The client's connection.
            job_id: Id of the job.
            report: Called with the job id when the job may have ended, and with the error if it cannot be read.
        """
        super().__init__(connection.redis, connection.keys.of_job(job_id), job_id)
        self._report = report

    def __repr__(self) -> str:
        return f"<EndListener {self.job_id}>"

    def deliver(self, payload: bytes) -> None:
        """Report the job after a terminal event, and when it will be retried, because its times have changed.

        A message that cannot be decoded is reported too: it may be a terminal event of a newer version.
        """
        if codec.is_tokens_event(payload):
            return
        try:
            event = codec.decode_event(payload)
        except ProtocolError:
            self.reread()
            return
        if isinstance(event, Finished | Failed | Retried):
            self.reread()

    def reread(self) -> None:
        """Report the job, because its terminal event may have been missed."""
        self._report(self.job_id, None)

    def update_state(self, state: StoredState) -> None:
        """Receive the state of the job."""
        self.on_deadline(state.due_ms)
        if state.status is None or has_ended(state.status):
            self.reread()

    def fail(self, error: Exception) -> None:
        """Report why the job cannot be read."""
        self._report(self.job_id, error)

    async def _read(self) -> None:
        """Do nothing: the collector reads."""


@dataclass(frozen=True, slots=True)
class _Followed(Generic[T]):
    """A job in the queue."""

    requests: list[WindowJob[T]]
    """The requests that this job answers. Several requests with the same idempotency key have one job."""
    listener: EndListener
    listening: AbstractContextManager[None]
    """Receives the messages of the job until its exit."""


class EndCollector(Generic[T]):
    """Waits for the ends of many jobs. Its caller receives each end once, through `on_end`."""

    def __init__(self, connection: QueueConnection, on_end: Callable[[WindowJob[T], Result | Exception], None]) -> None:
        """Create a collector without jobs.

        Args:
            connection: The client's connection.
            on_end: Called with each job that has ended and its outcome, `JobNotFound` if Redis has lost the job. It may
                neither block nor raise.
        """
        self._connection = connection
        self._on_end = on_end
        self._jobs: dict[str, _Followed[T]] = {}
        """The followed jobs by their ids."""
        self._reported: set[str] = set()
        """Jobs to read."""
        self._has_reports = asyncio.Event()
        self.reads = RetriedReads()
        """The reads of results. Their `error` is set while Redis does not answer."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __repr__(self) -> str:
        return f"<EndCollector jobs={len(self._jobs)} reported={len(self._reported)}>"

    def job_ids(self) -> list[str]:
        """Return the ids of the jobs that have not ended."""
        return list(self._jobs)

    def follow(self, job: WindowJob[T]) -> None:
        """Wait for the end of a submitted job. Requests with the same idempotency key have one job."""
        if job.handle is None:
            raise RuntimeError(f"{job.job_id} is not submitted")
        job_id = job.handle.id
        if job_id in self._jobs:
            self._jobs[job_id].requests.append(job)
            return
        listener = EndListener(self._connection, job_id, self._report)
        listening = self._connection.subscriber.listening(listener)
        self._jobs[job_id] = _Followed([job], listener, listening)  # first: the listener may report at once
        listening.__enter__()

    def close(self) -> None:
        """Stop waiting."""
        for followed in self._jobs.values():
            followed.listening.__exit__(None, None, None)
        self._jobs.clear()

    async def collect(self) -> None:
        """Read the results of jobs that have ended, until this task is cancelled.

        Raises:
            RedisError: Redis refuses to read the jobs.
        """
        while True:
            await self._has_reports.wait()
            while self._reported:
                some = [self._reported.pop() for _ in range(min(len(self._reported), JOBS_PER_ROUND_TRIP))]
                await self._read(some)
            self._has_reports.clear()

    def _report(self, job_id: str, error: Exception | None) -> None:
        if error is not None:
            self._end(job_id, error)
        elif job_id in self._jobs:
            self._reported.add(job_id)
            self._has_reports.set()

    async def _read(self, job_ids: list[str]) -> None:
        replies = await self.reads.read(lambda: self._read_hashes(job_ids))
        for job_id, values in zip(job_ids, replies, strict=True):
            if job_id not in self._jobs:
                continue
            if isinstance(values, RedisError):
                self._end(job_id, values)
                continue
            try:
                state = read_state(values[: len(STATE_FIELDS)])
            except ProtocolError as exc:
                self._end(job_id, exc)
                continue
            self._jobs[job_id].listener.on_deadline(state.due_ms)
            if state.status is None or has_ended(state.status):
                self._end(job_id, await self._outcome(job_id, values[len(STATE_FIELDS) :]))

    async def _read_hashes(self, job_ids: list[str]) -> list[Any]:
        keys = self._connection.keys
        async with self._connection.redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(keys.of_job(job_id).job, *STATE_FIELDS, *RESULT_FIELDS)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        for reply in replies:
            # For example, Redis loads its data after a restart.
            if isinstance(reply, RedisError) and is_temporary(reply):
                raise reply
        return replies

    async def _outcome(self, job_id: str, values: list[bytes | None]) -> Result | Exception:
        keys = self._connection.keys.of_job(job_id)
        try:
            return await self.reads.read(lambda: result_of(self._connection.redis, keys, job_id, values))
        except LlamaqError as exc:
            return exc

    def _end(self, job_id: str, outcome: Result | Exception) -> None:
        followed = self._jobs.pop(job_id, None)
        if followed is not None:
            followed.listening.__exit__(None, None, None)
            for job in followed.requests:
                self._on_end(job, outcome)
