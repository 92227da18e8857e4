"""`RequestMap` computes any number of requests for `map` of the clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from llamaq.common.errors import InvalidRequest, RequestFailed
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import Priority
from llamaq.producer.argument_checks import check_count, check_text
from llamaq.producer.job_window.outcome_queue import Outcome
from llamaq.producer.job_window.window import JobWindow, default_size
from llamaq.producer.option_synonyms import translate
from llamaq.producer.queries.queue_snapshots import read_workers
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.submission import build_request

MAX_RESUME_CHARS = 200
MAX_WINDOW = 100_000
REQUESTS_PER_YIELD = 50
"""After this many requests were read, other tasks of the event loop run."""

MapRequest = str | Mapping[str, Any]
"""A text prompt, or the arguments of `submit`."""


class MappedResult(Result):
    """The result of one request of `map`."""

    index: int = Field(description="Position of the request among the requests, from 0 on.")


class RequestMap:
    """Computes requests in a window of jobs, and returns their results in the order of the requests or their ends."""

    def __init__(
        self,
        connection: QueueConnection,
        options: Mapping[str, Any],
        *,
        ordered: bool,
        window: int | None,
        resume: str | None,
    ) -> None:
        """Check the arguments.

        Args:
            connection: The client's connection.
            options: Job options of all requests.
            ordered: Whether the results have the order of the requests.
            window: Largest number of jobs in the queue. None: by the number of slots of the queue's workers.
            resume: Prefix of the idempotency keys of the requests. None: they have none.

        Raises:
            InvalidRequest: An argument is not valid.
        """
        if window is not None:
            check_count("window", window, 1, MAX_WINDOW)
        if resume is not None:
            check_text("resume", resume, MAX_RESUME_CHARS)
        self._connection = connection
        self._options = {"priority": Priority.BULK, "stream": False, **translate(options)}
        self._ordered = ordered
        self._size = window
        self._resume = resume
        self._window: JobWindow[int] | None = None
        self._n_added = 0
        self._n_returned = 0
        self._early: dict[int, Outcome] = {}
        """Outcomes of later requests than the one whose result is returned next."""

    def __repr__(self) -> str:
        return f"<RequestMap added={self._n_added} returned={self._n_returned} {self._window!r}>"

    async def open(self) -> Self:
        """Look for the workers of the queue, and start.

        Raises:
            NoWorker: The client has `require_worker`, and no worker serves the queue.
        """
        settings = self._connection.settings
        if settings.require_worker:
            await self._connection.workers.require(settings.queue)
        if self._size is None:
            workers = await read_workers(self._connection, settings.queue)
            self._size = default_size(sum(worker.card.n_parallel for worker in workers))
        self._window = await JobWindow[int](self._connection, size=self._size).__aenter__()
        return self

    async def aclose(self) -> None:
        """Cancel the jobs that have not ended."""
        if self._window is not None:
            window, self._window = self._window, None
            await window.aclose()

    @property
    def room(self) -> int:
        """Number of requests that may be added now."""
        return self._opened.room

    @property
    def n_open(self) -> int:
        """Number of requests whose results were not returned."""
        return self._n_added - self._n_returned

    async def add(self, requests: Sequence[MapRequest]) -> None:
        """Add requests, not more than there is room for. The error of a request that is not valid is its result."""
        for request in requests:
            index, self._n_added = self._n_added, self._n_added + 1
            try:
                self._opened.add(index, await build_request(self._arguments(index, request)))
            except InvalidRequest as exc:
                self._opened.add_outcome(index, exc)

    async def read(self, requests: Iterable[MapRequest] | AsyncIterable[MapRequest]) -> None:
        """Add all requests as there is room for them."""
        if isinstance(requests, AsyncIterable):
            async for request in requests:
                await self._opened.wait_for_room()
                await self.add([request])
            return
        for count, request in enumerate(requests, start=1):
            await self._opened.wait_for_room()
            await self.add([request])
            if count % REQUESTS_PER_YIELD == 0:
                await asyncio.sleep(0)

    async def results(self, timeout_s: float | None = None) -> list[MappedResult | RequestFailed]:
        """Wait for results and return all that may be returned now.

        Args:
            timeout_s: Longest wait in seconds, after which the list is empty. None: no limit.

        Raises:
            InvalidSettings: The workers of the queue have another number of partitions.
            RedisError: Redis refuses the commands.
        """
        found = []
        for index, outcome in await self._opened.outcomes(timeout_s):
            self._early[index] = outcome
            if not self._ordered:
                found.append(_mapped(index, self._early.pop(index)))
        while self._ordered and (index := self._n_returned + len(found)) in self._early:
            found.append(_mapped(index, self._early.pop(index)))
        self._n_returned += len(found)
        self._opened.release(len(found))
        return found

    @property
    def _opened(self) -> JobWindow[int]:
        if self._window is None:
            raise RuntimeError("this map is closed")
        return self._window

    def _arguments(self, index: int, request: MapRequest) -> Any:
        if isinstance(request, str):
            request = {"prompt": request}
        elif not isinstance(request, Mapping):
            raise InvalidRequest("a text or a mapping of the arguments of `submit` is required")
        arguments = {**self._options, **translate(request)}
        if self._resume is not None:
            if "idempotency_key" in arguments:
                raise InvalidRequest("idempotency_key: it cannot be combined with resume")
            arguments["idempotency_key"] = f"{self._resume}:{index}"
        return arguments


def _mapped(index: int, outcome: Outcome) -> MappedResult | RequestFailed:
    if isinstance(outcome, Result):
        return MappedResult(**dict(outcome), index=index)
    failed = RequestFailed(index, outcome)
    failed.__cause__ = outcome
    return failed
