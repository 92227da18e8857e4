"""Runs the jobs of one request: submits them together, follows them, and cancels them if the request ends early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from http import HTTPStatus
from typing import Any, TypeVar, cast

from llamaq.common.background_tasks import all_of, cancel_tasks
from llamaq.common.errors import InvalidSettings, JobCancelled, JobNotFound
from llamaq.common.protocol.job_request import JobRequest
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.idempotent_request import IdempotentRequest
from llamaq.producer import AsyncClient, AsyncJob, AsyncStream, Chunk, FinishReason, JobOptions, Result
from llamaq.producer.submission import build_request

T = TypeVar("T")

RenewClient = Callable[[AsyncClient], Awaitable[AsyncClient]]

Piece = tuple[int, Chunk | Result]
"""The number of a job among the jobs of the request, and its next chunk. The last piece has the result instead."""


class Generation:
    """The jobs of one request."""

    def __init__(
        self,
        client: AsyncClient,
        jobs: Sequence[dict[str, Any]],
        idempotency_key: str | None = None,
        *,
        is_kept: bool = False,
        max_tokens: int | None = None,
        renew_client: RenewClient | None = None,
    ) -> None:
        """Prepare the jobs.

        Args:
            client: The client of their queue.
            jobs: The arguments of `submit` for each job.
            idempotency_key: The key of the request. A repeated request gets the same jobs, so they are never cancelled.
                None: the jobs belong to this request alone, and end with it or with this server.
            is_kept: Whether the jobs continue without their client, once it has their ids (`keep`).
            max_tokens: The `max_tokens` of jobs that have none. None: they end at the end of the context.
            renew_client: Returns the client with the right number of partitions, if that of `client` is wrong.
        """
        self.client = client
        self._is_kept = is_kept
        self._idempotent = None if idempotency_key is None else IdempotentRequest(idempotency_key, len(jobs))
        self._jobs = [{**job, **self._ownership(number)} for number, job in enumerate(jobs)]
        self._max_tokens = max_tokens
        self._renew_client = renew_client
        self.requests: list[JobRequest] = []
        """The requests of the jobs, after `results` or `start`."""
        self.streams: list[AsyncStream] = []
        """The streams of the jobs, after `start`."""
        self._begun: list[AsyncStream] = []
        """The same streams, even before `start` has submitted all jobs."""

    def _ownership(self, number: int) -> dict[str, Any]:
        """Return the options of a job that decide whether it ends with its request."""
        key = self.key_of_job(number)
        return {"cancel_on_disconnect": not self._is_kept} if key is None else {"idempotency_key": key}

    def key_of_job(self, number: int) -> str | None:
        """Return the idempotency key of a job. None: it has no key."""
        return None if self._idempotent is None else self._idempotent.key_of_job(number)

    async def results(self, check: Callable[[Result], None] = lambda _: None) -> list[Result]:
        """Submit the jobs and return their results. If one fails, or the caller is cancelled, all are cancelled.

        Args:
            check: Called with each result when it arrives. If it raises an error, all jobs are cancelled.

        Raises:
            JobCancelled: An operator or another client cancelled a job.
        """
        await self._build_requests(stream=False)
        async with self._recorded():
            return await all_of([self._result(request, check) for request in self.requests])

    async def _result(self, request: JobRequest, check: Callable[[Result], None]) -> Result:
        with _refusing_lost_jobs():
            result = _not_cancelled(await self._submit(lambda client: client.auto_cancelled.generate(request, None)))
        check(result)
        return result

    async def _build_requests(self, *, stream: bool) -> None:
        options = [cast("JobOptions", {**values, "stream": stream}) for values in self._jobs]
        self.requests = [limited(await build_request(each), self._max_tokens) for each in options]

    def _recorded(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which the jobs are submitted."""
        return nullcontext() if self._idempotent is None else self._idempotent.recorded(self.client)

    async def start(self, *, stream: bool = True) -> None:
        """Submit the jobs, all or none.

        Args:
            stream: Whether the jobs publish each token. Otherwise all text comes at the end, which costs Redis less.
        """
        await self._build_requests(stream=stream)
        try:
            async with self._recorded():
                self.streams = await all_of([self._stream(request) for request in self.requests])
        except BaseException:
            await self.aclose()
            raise

    async def _stream(self, request: JobRequest) -> AsyncStream:
        stream = await self._submit(lambda client: client.auto_cancelled.stream(request, None))
        self._begun.append(stream)
        return stream

    async def _submit(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Make a call that submits a job. If the number of partitions is wrong, make it again with a new client."""
        client = self.client
        try:
            return await call(client)
        except InvalidSettings:  # no job was submitted
            if self._renew_client is None:
                raise
            self.client = await self._renew_client(client)
            return await call(self.client)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the chunks of the started jobs in the order in which they arrive, and the result of each job at its
        end.

        Raises:
            JobCancelled: An operator or another client cancelled a job.
        """
        async with aclosing(self.all_pieces()) as pieces:
            async for number, piece in pieces:
                yield number, _not_cancelled(piece) if isinstance(piece, Result) else piece

    async def all_pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the same as `pieces`, but also the results of cancelled jobs."""
        try:
            with _refusing_lost_jobs():
                if len(self.streams) == 1:
                    async for chunk in self.streams[0]:
                        yield 0, chunk
                    yield 0, await self._end_of(self.streams[0])
                    return
                async with aclosing(self._merged()) as merged:
                    async for piece in merged:
                        yield piece
        finally:
            await self.aclose()

    async def _merged(self) -> AsyncGenerator[Piece, None]:
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=len(self.streams))

        async def follow(number: int, stream: AsyncStream) -> None:
            try:
                async for chunk in stream:
                    await pieces.put((number, chunk))
                await pieces.put((number, await self._end_of(stream)))
            except Exception as exc:  # noqa: BLE001  # the reader raises it
                await pieces.put(exc)

        following = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(self.streams)]
        n_open = len(following)
        try:
            while n_open:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                n_open -= isinstance(piece[1], Result)
                yield piece
        finally:
            await cancel_tasks(*following)

    async def _end_of(self, stream: AsyncStream) -> Result:
        # A new handle reads the result at once. The handle of the submit would wait for the end of the job.
        return await self.client.job(stream.job.id).result()

    def keep(self) -> None:
        """Let the jobs continue without their client, if the request asks for that. The client gets their ids now."""
        if self._is_kept:
            for stream in self.streams:
                stream.job.is_shared = True

    async def aclose(self) -> None:
        """End the streams, and cancel their jobs unless these have ended or do not belong to the request alone."""
        await asyncio.gather(*(stream.aclose() for stream in self._begun))

    async def describe_wait(self) -> str:
        """Return a text with the state of the first job."""
        return await describe_wait(self.streams[0].job)


@contextmanager
def _refusing_lost_jobs() -> Iterator[None]:
    """Tell the client to repeat the request if Redis has lost its job. The status 404 would blame the request."""
    try:
        yield
    except JobNotFound as exc:
        message = "Redis has lost the job of this request; send it again"
        raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, message, code="job_lost") from exc


def _not_cancelled(result: Result) -> Result:
    """Return the result. Raises `JobCancelled` for a cancelled job: its answer would look complete in some APIs."""
    if result.finish_reason is FinishReason.CANCELLED:
        raise JobCancelled(result.job_id)
    return result


async def describe_wait(job: AsyncJob) -> str:
    """Return a text with the state of a job: its position in the queue while it waits."""
    n_ahead = await job.position()
    return "running" if n_ahead is None else f"queued, {n_ahead} ahead"


def with_max_tokens(options: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Return the options of a job that generates text, with the `max_tokens` that `limited` would give to it."""
    if options.get("max_tokens") is not None or max_tokens is None:
        return options
    least = options.get("min_tokens")
    return {**options, "max_tokens": max(max_tokens, least) if isinstance(least, int) else max_tokens}


def limited(request: JobRequest, max_tokens: int | None) -> JobRequest:
    """Return a request that has `max_tokens`, or its own `min_tokens` if that is more, if the request itself has no
    `max_tokens` and generates text.
    """
    if request.max_tokens is not None or max_tokens is None or request.embed is not None:
        return request
    return request.model_copy(update={"max_tokens": max(max_tokens, request.min_tokens)})
