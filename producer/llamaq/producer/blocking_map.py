"""`map` of the blocking client. The requests are read in the thread of the caller, not in that of the client."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Generator, Iterable, Iterator
from typing import Any, Literal, Unpack, overload

from llamaq.common.errors import RequestFailed
from llamaq.common.protocol.job_request import JobOptions
from llamaq.producer.blocking_portal import BlockingPortal
from llamaq.producer.job_window.request_map import MappedResult, MapRequest, RequestMap

READ_S = 0.02
"""Longest time for which requests are read before results are returned, unless one request takes longer."""


class BlockingMapCall(ABC):
    """Base of `Client` with the call `map`."""

    @abstractmethod
    def _running_portal(self) -> BlockingPortal:
        """Return the portal of this process, and start it if needed."""

    @overload
    def map(
        self,
        requests: Iterable[MapRequest] | AsyncIterable[MapRequest],
        *,
        ordered: bool = True,
        window: int | None = None,
        resume: str | None = None,
        raise_errors: Literal[True] = True,
        **options: Unpack[JobOptions],
    ) -> Generator[MappedResult, None, None]: ...

    @overload
    def map(
        self,
        requests: Iterable[MapRequest] | AsyncIterable[MapRequest],
        *,
        ordered: bool = True,
        window: int | None = None,
        resume: str | None = None,
        raise_errors: bool,
        **options: Unpack[JobOptions],
    ) -> Generator[MappedResult | RequestFailed, None, None]: ...

    def map(
        self,
        requests: Iterable[MapRequest] | AsyncIterable[MapRequest],
        *,
        ordered: bool = True,
        window: int | None = None,
        resume: str | None = None,
        raise_errors: bool = True,
        **options: Any,
    ) -> Generator[MappedResult | RequestFailed, None, None]:
        """Compute any number of requests and yield their results. Leaving the loop early cancels the jobs in flight.

            for result in client.map({"prompt": text, "max_tokens": 64} for text in texts):
                print(result.index, result.text)

        Requests are read as earlier ones end, so `requests` may be endless. Those that share a prefix are submitted one
        after the other. A full queue, a full Redis and a Redis that does not answer slow the call down: it has no
        timeout.

        Args:
            requests: Text prompts, or mappings with the arguments of `submit`. An iterator runs in the thread of the
                caller, and may use this client. An asynchronous one runs in the thread of the client.
            ordered: Whether the results have the order of the requests. False: the order in which the jobs end.
            window: Largest number of jobs in the queue. None: 4 for each slot of the queue's workers, at least 256.
            resume: A name for these requests. If the process dies, the same call with the same name and requests
                receives the results that Redis still stores (`result_ttl_s`), and computes the others.
            raise_errors: Whether the first failed request ends the loop with its error. False: yield the errors.
            **options: Job options of all requests, which a request may override. `priority` is `bulk` by default.

        Yields:
            A `MappedResult` for each request: a `Result` with the `index` of the request. If `raise_errors` is False, a
            `RequestFailed` in place of a result.

        Raises:
            InvalidRequest: An argument is not valid.
            RequestFailed: A request failed; `index` and `error` tell which one and why.
            NoWorker: The client has `require_worker`, and no worker serves the queue.
            InvalidSettings: The workers of the queue have another number of partitions.
        """
        portal = self._running_portal()
        if isinstance(requests, AsyncIterable):
            yield from portal.iterate(
                portal.client.map(
                    requests, ordered=ordered, window=window, resume=resume, raise_errors=raise_errors, **options
                )
            )
            return
        computed = RequestMap(portal.client.connection, options, ordered=ordered, window=window, resume=resume)
        with portal.closing(computed):
            portal.run(computed.open)
            for result in _results(portal, computed, iter(requests)):
                if raise_errors and isinstance(result, RequestFailed):
                    raise result
                yield result


def _results(
    portal: BlockingPortal, computed: RequestMap, requests: Iterator[MapRequest]
) -> Iterator[MappedResult | RequestFailed]:
    """Add the requests as there is room, and yield the results."""
    has_more = True
    while has_more or computed.n_open:
        if has_more and computed.room:
            some, has_more = _read_some(requests, computed.room)
            portal.run(lambda some=some: computed.add(some))  # type: ignore[misc]  # a default binds the list
        timeout_s = 0.0 if has_more and computed.room else None
        if computed.n_open:
            yield from portal.run(lambda timeout_s=timeout_s: computed.results(timeout_s))  # type: ignore[misc]


def _read_some(requests: Iterator[MapRequest], room: int) -> tuple[list[MapRequest], bool]:
    """Return the next requests, and whether there may be more."""
    some: list[MapRequest] = []
    end_s = time.monotonic() + READ_S
    while len(some) < room:
        try:
            some.append(next(requests))
        except StopIteration:
            return some, False
        if time.monotonic() > end_s:
            break
    return some, True
