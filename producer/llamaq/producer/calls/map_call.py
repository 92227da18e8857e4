"""`map` of the asyncio client: computes any number of requests with a bounded number of jobs in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import aclosing
from typing import Any, Literal, Unpack, overload

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import RequestFailed
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer.argument_checks import check_list
from llamaq.producer.calls.calls_base import ClientCalls
from llamaq.producer.job_window.request_map import MappedResult, MapRequest, RequestMap


class MapCall(ClientCalls):
    """The call `map`."""

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
    ) -> AsyncGenerator[MappedResult, None]: ...

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
    ) -> AsyncGenerator[MappedResult | RequestFailed, None]: ...

    async def map(
        self,
        requests: Iterable[MapRequest] | AsyncIterable[MapRequest],
        *,
        ordered: bool = True,
        window: int | None = None,
        resume: str | None = None,
        raise_errors: bool = True,
        **options: Any,
    ) -> AsyncGenerator[MappedResult | RequestFailed, None]:
        """Compute any number of requests and yield their results. Leaving the loop early cancels the jobs in flight.

            async for result in client.map({"prompt": text, "max_tokens": 64} for text in texts):
                print(result.index, result.text)

        A request is read when an earlier one has ended, so `requests` may be endless. Requests that share a prefix are
        submitted one after the other. A full queue, a full Redis and a Redis that does not answer slow the call down:
        it has no timeout.

        Args:
            requests: Text prompts, or mappings with the arguments of `submit`. A generator runs in the thread of the
                caller, and may use a blocking client there. Results that are ready wait until it yields a request. In
                asyncio it must not block; an asynchronous one may wait, and delays no result.
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
        check_list("requests", requests)
        computed = RequestMap(self.connection, options, ordered=ordered, window=window, resume=resume)
        async with aclosing(await computed.open()):
            reading = asyncio.create_task(computed.read(requests))
            waiting: asyncio.Task[list[MappedResult | RequestFailed]] | None = None
            try:
                while not reading.done() or computed.n_open:
                    waiting = waiting or asyncio.create_task(computed.results())
                    await asyncio.wait(
                        [waiting] if reading.done() else [waiting, reading], return_when="FIRST_COMPLETED"
                    )
                    if waiting.done():
                        results, waiting = waiting.result(), None
                        for result in results:
                            if raise_errors and isinstance(result, RequestFailed):
                                raise result
                            yield result
                    if reading.done():
                        reading.result()  # raises the error of the iterator of the requests
            finally:
                await cancel_tasks(reading, *([waiting] if waiting else []))
