"""`JobWindow` runs any number of jobs, with a bounded number of them in the queue and in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import IdempotencyConflict, JobNotFound
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.redis.shared_round_trips import CLOSED
from llamaq.producer.job_window.end_collector import EndCollector
from llamaq.producer.job_window.outcome_queue import Outcome, OutcomeQueue
from llamaq.producer.job_window.window_job import WindowJob
from llamaq.producer.job_window.window_submitter import WindowSubmitter
from llamaq.producer.queue_connection import QueueConnection

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_SIZE = 256
"""Smallest default for the number of jobs in the queue."""
JOBS_PER_SLOT = 4
"""Jobs in the queue for each slot of the queue's workers, so that a free slot never waits for this client."""
CANCELS_AT_ONCE = 50


def default_size(n_slots: int) -> int:
    """Return the default number of jobs in the queue, for workers with this number of slots."""
    return max(DEFAULT_SIZE, JOBS_PER_SLOT * n_slots)


class JobWindow(Generic[T]):
    """Submits a request when an earlier one has ended, and returns the outcome of each request.

        async with JobWindow(connection, size=256) as window:
            window.add(1, request)
            while window.n_held:
                for tag, outcome in await window.outcomes():
                    window.release(1)

    Requests that share a prefix are submitted one after the other. A full queue, a full Redis and a Redis that does
    not answer slow the window down: no request fails because of them. A job that Redis has lost is submitted again.

    At the end of the context, jobs that have not ended are cancelled.
    """

    def __init__(
        self, connection: QueueConnection, *, size: int, rate: float | None = None, replaces_conflicts: bool = False
    ) -> None:
        """Create a window without requests.

        Args:
            connection: The client's connection.
            size: Largest number of jobs in the queue. The same number of further requests may wait here, to be sorted.
            rate: Largest number of jobs submitted per second. None: no limit.
            replaces_conflicts: What happens if an earlier process has submitted another request with the same
                idempotency key. True: a new job replaces the earlier one. False: the outcome is `IdempotencyConflict`.
        """
        self._connection = connection
        self._size = size
        self._outcomes: OutcomeQueue[T] = OutcomeQueue()
        self._ends: EndCollector[T] = EndCollector(connection, self._end)
        self._submitter = WindowSubmitter(connection, self._ends, self._end, size=size, rate=rate)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Lock()
        self._has_room = asyncio.Event()
        self._replaces_conflicts = replaces_conflicts
        self._keeps_jobs = False
        self.n_held = 0
        """Number of requests that were added and not released."""

    def __repr__(self) -> str:
        return f"<JobWindow held={self.n_held} waiting={self._submitter.n_waiting} in_flight={self.n_in_flight}>"

    @property
    def n_in_flight(self) -> int:
        """Number of jobs in the queue."""
        return len(self._ends)

    @property
    def room(self) -> int:
        """Number of requests that may be added now."""
        return max(0, 2 * self._size - self.n_held)

    @property
    def problem(self) -> str | None:
        """Why no job is submitted now, as a sentence without a period. None: nothing is wrong."""
        if self._ends.reads.error is not None:
            return f"Redis does not answer: {self._ends.reads.error}"
        return self._submitter.problem

    async def __aenter__(self) -> Self:
        self._connection.calls.check_open()
        self._connection.calls.windows.add(self)
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._submitter.run, self._ends.collect)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Submit no more requests, and cancel the jobs that have not ended. From now on, `outcomes` raises an error.

        The close of the client calls this too, while the context may be at its end.
        """
        self._outcomes.fail(self._outcomes.failure or RuntimeError(CLOSED))
        async with self._closing:
            try:  # otherwise the jobs of an interrupted submit would stay in the queue
                await self._submitter.await_submit()
            finally:
                await cancel_tasks(*self._tasks)
                job_ids = [] if self._keeps_jobs else self._ends.job_ids()
                self._ends.close()
            await self._cancel(job_ids)

    def add(self, tag: T, request: JobRequest) -> None:
        """Add a request. The caller adds no more requests than there is room for.

        Args:
            tag: Returned with the outcome of the request.
            request: The validated request.
        """
        self.n_held += 1
        self._submitter.add(WindowJob(tag, request))

    def add_outcome(self, tag: T, outcome: Outcome) -> None:
        """Add a request whose outcome is known already. This outcome is returned like the outcome of a job.

        Args:
            tag: Returned with the outcome.
            outcome: The outcome, such as the error of a request that is not valid.
        """
        self.n_held += 1
        self._outcomes.add(tag, outcome)

    def keep_jobs(self) -> None:
        """Leave the jobs in the queue at the end of the context. Requests with idempotency keys find them later."""
        self._keeps_jobs = True

    def release(self, n_requests: int = 1) -> None:
        """Make room for other requests, because the caller has used this number of outcomes."""
        self.n_held -= n_requests
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Wait until a request may be added."""
        while not self.room:
            self._has_room.clear()
            await self._has_room.wait()

    async def outcomes(self, timeout_s: float | None = None) -> list[tuple[T, Outcome]]:
        """Wait for outcomes, and return all that are there. Each outcome is returned once.

        Args:
            timeout_s: Longest wait in seconds, after which the list is empty. None: no limit.

        Raises:
            InvalidSettings: The workers of the queue have another number of partitions.
            RedisError: Redis refuses the commands of the window.
        """
        return await self._outcomes.take(timeout_s)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001  # `outcomes` raises it
            self._outcomes.fail(exc)

    def _end(self, job: WindowJob[T], outcome: Outcome) -> None:
        """Pass on the outcome of a job, or submit its request again."""
        if isinstance(outcome, JobNotFound):
            log.info("window.job_lost id=%s: it is submitted again", job.job_id)
            job.forget()
            self._submitter.add_again(job)
        elif job.must_replace(outcome) or (self._replaces_conflicts and isinstance(outcome, IdempotencyConflict)):
            job.replace()
            self._submitter.add_again(job)
        else:
            self._outcomes.add(job.tag, outcome)
        self._submitter.note_end()

    async def _cancel(self, job_ids: list[str]) -> None:
        """Cancel jobs. An error is logged: the caller has an outcome or an error already."""
        for start in range(0, len(job_ids), CANCELS_AT_ONCE):
            some = job_ids[start : start + CANCELS_AT_ONCE]
            replies = await asyncio.gather(
                *(self._connection.scripts.cancel(job_id) for job_id in some), return_exceptions=True
            )
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            if errors:
                log.warning("window.cancel_failed jobs=%d error=%s", len(errors), errors[0])
                return
