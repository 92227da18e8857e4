"""`map` of the blocking client. The requests are read in the thread of the caller, not in the thread of the client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Generator, Iterable, Iterator
from typing import Any

from llamaq.common.errors import RequestFailed
from llamaq.producer.argument_checks import check_list
from llamaq.producer.blocking_portal import BlockingPortal
from llamaq.producer.job_window.request_map import MappedResult, MapRequest, RequestMap

READ_S = 0.02
"""Longest time for which requests are read before results are returned, unless one request takes longer."""


def blocking_map(
    portal: BlockingPortal,
    requests: Iterable[MapRequest] | AsyncIterable[MapRequest],
    *,
    ordered: bool,
    window: int | None,
    resume: str | None,
    raise_errors: bool,
    **options: Any,
) -> Generator[MappedResult | RequestFailed, None, None]:
    """Compute the requests and yield their results. `AsyncClient.map` documents the arguments.

    An iterator of requests runs in the thread of the caller, an asynchronous one in that of the client.
    """
    if isinstance(requests, AsyncIterable):
        yield from portal.iterate(
            portal.client.map(
                requests, ordered=ordered, window=window, resume=resume, raise_errors=raise_errors, **options
            )
        )
        return
    check_list("requests", requests)
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
