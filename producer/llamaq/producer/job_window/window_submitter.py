"""Submits the waiting requests of a window while there is room in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from llamaq.common.backoff import Backoff
from llamaq.producer.job_window.end_collector import EndCollector
from llamaq.producer.job_window.prefix_order import PrefixOrder
from llamaq.producer.job_window.submit_rate_limit import SubmitRateLimit
from llamaq.producer.job_window.submit_window_jobs import submit_jobs
from llamaq.producer.job_window.window_job import WindowJob
from llamaq.producer.queue_connection import QueueConnection

T = TypeVar("T")

JOBS_AT_ONCE = 100
"""Largest number of jobs in one round trip."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses while the queue or Redis is full, or Redis does not answer."""
LAST_SUBMIT_S = 5.0
"""Longest wait at the end for a submit that Redis has not answered."""


class WindowSubmitter(Generic[T]):
    """Submits requests, those that share a prefix one after the other. Refused requests wait for another try.

    Args:
        connection: The client's connection.
        ends: Follows the submitted jobs.
        on_failed: Called with each request that can never be submitted, and with its error.
        size: Largest number of jobs in the queue.
        rate: Largest number of jobs submitted per second. None: no limit.
    """

    def __init__(
        self,
        connection: QueueConnection,
        ends: EndCollector[T],
        on_failed: Callable[[WindowJob[T], Exception], None],
        *,
        size: int,
        rate: float | None,
    ) -> None:
        self._connection = connection
        self._ends = ends
        self._on_failed = on_failed
        self._size = size
        self._rate_limit = SubmitRateLimit(rate, asyncio.get_running_loop().time)
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._n_at_once = JOBS_AT_ONCE
        """Largest number of jobs in the next round trip. It is small after the queue has refused jobs."""
        self._waiting: PrefixOrder[T] = PrefixOrder()
        self._has_work = asyncio.Event()
        self._has_end = asyncio.Event()
        self._submitting = asyncio.Lock()
        self.problem: str | None = None
        """Why the last requests were refused, as a sentence without a period. None: they were accepted."""

    def __repr__(self) -> str:
        return f"<WindowSubmitter waiting={self.n_waiting} at_once={self._n_at_once}>"

    @property
    def n_waiting(self) -> int:
        """Number of requests that are not submitted."""
        return len(self._waiting)

    def add(self, job: WindowJob[T]) -> None:
        """Submit a new request, when there is room."""
        self._waiting.add(job)
        self._has_work.set()

    def add_again(self, job: WindowJob[T]) -> None:
        """Submit a request before all that wait, because its job does not exist any more or is replaced."""
        self._waiting.put_back([job])
        self._has_work.set()

    def note_end(self) -> None:
        """Continue, because a job of the window has ended: the queue has room for another one."""
        self._has_work.set()
        self._has_end.set()

    async def run(self) -> None:
        """Submit waiting requests while there is room in the queue, until this task is cancelled.

        Raises:
            InvalidSettings: The workers of the queue use another number of partitions than this client.
            RedisError: Redis refuses the commands.
        """
        while True:
            self._has_work.clear()
            n_free = min(self._size - len(self._ends), self._n_at_once)
            if not self.n_waiting or n_free <= 0:
                await self._has_work.wait()
                continue
            n_allowed = self._rate_limit.n_allowed(n_free)
            if not n_allowed:
                await asyncio.sleep(self._rate_limit.delay_s)
                continue
            jobs = self._waiting.pop(n_allowed)
            async with self._submitting:
                n_accepted = await self._submit(jobs)
            if self.problem is None:
                self._n_at_once = min(2 * self._n_at_once, JOBS_AT_ONCE)
                self._pauses.reset()
            else:
                await self._pause(n_accepted)

    async def await_submit(self) -> None:
        """Wait up to `LAST_SUBMIT_S` for the reply to a submit, so that its jobs are known. Then cancel `run`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SUBMIT_S), self._submitting:
                pass

    async def _submit(self, jobs: list[WindowJob[T]]) -> int:
        """Submit requests, and set `problem`. Requests that cannot be submitted now wait again.

        Returns:
            The number of submitted requests.
        """
        submitted = await submit_jobs(self._connection, jobs)
        for job in submitted.accepted:
            self._ends.follow(job)
        for job, error in submitted.failed:
            self._on_failed(job, error)
        self._rate_limit.count(len(submitted.accepted))
        self._waiting.put_back(submitted.refused)
        if submitted.fatal is not None:
            raise submitted.fatal
        self.problem = submitted.problem
        return len(submitted.accepted)

    async def _pause(self, n_accepted: int) -> None:
        """Wait, after requests were refused, until a job of this window ends, because the queue then has room."""
        self._n_at_once = max(1, n_accepted)
        if n_accepted:
            self._pauses.reset()
        self._has_end.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pauses.next_delay_s()):
                await self._has_end.wait()
