"""`JobWindow` runs any number of jobs, with a bounded number of them in the queue and in memory."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.backoff import Backoff
from llamaq.common.errors import IdempotencyConflict, JobNotFound
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.redis.shared_round_trips import CLOSED
from llamaq.producer.job_window.end_collector import EndCollector
from llamaq.producer.job_window.prefix_order import PrefixOrder
from llamaq.producer.job_window.submit_rate_limit import Pace
from llamaq.producer.job_window.submit_window_jobs import submit_jobs
from llamaq.producer.job_window.window_job import WindowJob
from llamaq.producer.queue_connection import QueueConnection

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_SIZE = 256
"""Smallest default for the number of jobs in the queue."""
JOBS_PER_SLOT = 4
"""Jobs in the queue for each slot of the queue's workers, so that a free slot never waits for this client."""
JOBS_AT_ONCE = 100
"""Largest number of jobs in one round trip."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses while the queue or Redis is full, or Redis does not answer."""
CANCELS_AT_ONCE = 50
LAST_SUBMIT_S = 5.0
"""Longest wait at the end for a submit that Redis has not answered."""

Outcome = Result | Exception
"""How a job ended: its result, or its error."""


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
        self._waiting: PrefixOrder[T] = PrefixOrder()
        self._ends: EndCollector[T] = EndCollector(connection, self._end)
        self._pace = Pace(rate, asyncio.get_running_loop().time)
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._n_at_once = JOBS_AT_ONCE
        """Largest number of jobs in the next round trip. It is small after the queue has refused jobs."""
        self._outcomes: deque[tuple[T, Outcome]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._submitting = asyncio.Lock()
        self._closing = asyncio.Lock()
        self._has_work = asyncio.Event()
        self._has_end = asyncio.Event()
        self._has_outcomes = asyncio.Event()
        self._has_room = asyncio.Event()
        self._submit_problem: str | None = None
        self._replaces_conflicts = replaces_conflicts
        self._keeps_jobs = False
        self.n_held = 0
        """Number of requests that were added and not released."""

    def __repr__(self) -> str:
        return f"<JobWindow held={self.n_held} waiting={len(self._waiting)} in_flight={self.n_in_flight}>"

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
        return self._submit_problem

    async def __aenter__(self) -> Self:
        self._connection.calls.check_open()
        self._connection.calls.windows.add(self)
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._submit, self._ends.collect)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Submit no more requests, and cancel the jobs that have not ended. From now on, `outcomes` raises an error.

        The close of the client calls this too, while the context may be at its end.
        """
        self._fail(self._failure or RuntimeError(CLOSED))
        async with self._closing:
            try:  # otherwise the jobs of an interrupted submit would stay in the queue
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SUBMIT_S), self._submitting:
                        pass
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
        self._waiting.add(WindowJob(tag, request))
        self._has_work.set()

    def add_outcome(self, tag: T, outcome: Outcome) -> None:
        """Add a request whose outcome is known already. This outcome is returned like the outcome of a job.

        Args:
            tag: Returned with the outcome.
            outcome: The outcome, such as the error of a request that is not valid.
        """
        self.n_held += 1
        self._outcomes.append((tag, outcome))
        self._has_outcomes.set()

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
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._outcomes and self._failure is None:
                    self._has_outcomes.clear()
                    await self._has_outcomes.wait()
        if self._failure is not None and not self._outcomes:
            raise self._failure
        found = list(self._outcomes)
        self._outcomes.clear()
        return found

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001  # `outcomes` raises it
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._has_outcomes.set()

    async def _submit(self) -> None:
        """Submit waiting requests while there is room in the queue, until this task is cancelled."""
        while True:
            self._has_work.clear()
            n_free = min(self._size - self.n_in_flight, self._n_at_once)
            if not len(self._waiting) or n_free <= 0:
                await self._has_work.wait()
                continue
            n_allowed = self._pace.n_allowed(n_free)
            if not n_allowed:
                await asyncio.sleep(self._pace.delay_s)
                continue
            jobs = self._waiting.pop(n_allowed)
            async with self._submitting:
                n_accepted, self._submit_problem = await self._submit_some(jobs)
            if self._submit_problem is None:
                self._n_at_once = min(2 * self._n_at_once, JOBS_AT_ONCE)
                self._pauses.reset()
            else:
                await self._pause(n_accepted)

    async def _pause(self, n_accepted: int) -> None:
        """Wait, after requests were refused, until a job of this window ends, because the queue then has room."""
        self._n_at_once = max(1, n_accepted)
        if n_accepted:
            self._pauses.reset()
        self._has_end.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pauses.next_delay_s()):
                await self._has_end.wait()

    async def _submit_some(self, jobs: list[WindowJob[T]]) -> tuple[int, str | None]:
        """Submit requests. Requests that cannot be submitted now wait again.

        Returns:
            The number of submitted requests, and the reason why the others were not submitted. None: all were
            submitted.

        Raises:
            InvalidSettings: The workers of the queue use another number of partitions than this client.
            RedisError: Redis refuses the commands.
        """
        submitted = await submit_jobs(self._connection, jobs)
        for job in submitted.accepted:
            self._ends.follow(job)
        for job, error in submitted.failed:
            self._end(job, error)
        self._pace.count(len(submitted.accepted))
        self._waiting.put_back(submitted.refused)
        if submitted.fatal is not None:
            raise submitted.fatal
        return len(submitted.accepted), submitted.problem

    def _end(self, job: WindowJob[T], outcome: Outcome) -> None:
        """Pass on the outcome of a job, or submit its request again."""
        if isinstance(outcome, JobNotFound):
            log.info("window.job_lost id=%s: it is submitted again", job.job_id)
            job.forget()
            self._waiting.put_back([job])
        elif job.must_replace(outcome) or (self._replaces_conflicts and isinstance(outcome, IdempotencyConflict)):
            job.replace()
            self._waiting.put_back([job])
        else:
            self._outcomes.append((job.tag, outcome))
            self._has_outcomes.set()
        self._has_work.set()
        self._has_end.set()

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
