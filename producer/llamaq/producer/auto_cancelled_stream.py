"""The stream of a job that belongs to its reader: when the reader stops, the job is cancelled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from llamaq.common.errors import JobFailed, JobNotFound, ResultTimeout
from llamaq.producer.job_handle import AsyncJob, Chunk

LOOK_S = 0.25
"""Interval at which `AsyncStream.started` checks whether its reader has disconnected."""


class JobOwner(Protocol):
    """Cancels the jobs of streams that end early."""

    def cancel_soon(self, job: AsyncJob) -> asyncio.Task[bool]:
        """Cancel a job in a separate task."""

    async def explain(self, timeout: ResultTimeout, job: AsyncJob, *, is_cancelled: bool) -> Exception:
        """Return the error to raise after `timeout`. `cancel_soon` returned `is_cancelled`."""


class AsyncStream:
    """The chunks of a submitted job, in order. `AsyncClient.stream` returns it.

        stream = await client.stream("Once upon a time")
        async for chunk in stream:
            print(chunk.text, end="", flush=True)

    The job belongs to the stream. The job is cancelled when the stream ends early: when the stream times out or is
    closed, when its reader is interrupted, or when the stream is garbage collected. A job with an idempotency key is
    never cancelled, because other callers may share it.
    """

    job: AsyncJob
    """The handle of the job, for example for its result after the last chunk."""

    def __init__(self, job: AsyncJob, timeout: float | None, owner: JobOwner) -> None:
        self.job = job
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._chunks = job.stream(timeout=timeout)
        self._received: deque[Chunk] = deque()
        """The chunk that `started` has received, which comes first."""
        self._has_ended = False
        """Whether the job has ended or its cancellation was started."""
        self._cancelling: asyncio.Task[bool] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.job.id} {'ended' if self._has_ended else 'open'}>"

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Chunk]:
        return self._receive()

    async def started(self, is_gone: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Wait until the first chunk has arrived or the job has ended. The iteration then begins with this chunk.

        A web backend calls this method before it starts a response. So it can answer all errors before the first chunk
        with a status.

        Args:
            is_gone: Returns whether the reader has disconnected, such as `request.is_disconnected` of Starlette. If so,
                the stream is closed and has no chunks.

        Raises:
            JobFailed: The job failed before its first chunk; `code` and `message` give the reason.
            NoWorker: The timeout was reached, and no worker serves the queue; or the client has `require_worker`.
            ResultTimeout: The timeout was reached.
        """
        if self._received or self._has_ended:
            return
        receiving = asyncio.ensure_future(self._receive_first())
        try:
            while not (await asyncio.wait([receiving], timeout=None if is_gone is None else LOOK_S))[0]:
                if is_gone is not None and await is_gone():
                    break
        finally:
            if not receiving.done():
                receiving.cancel()  # this cancels the job too
                await asyncio.wait([receiving])
        if not receiving.cancelled():
            receiving.result()

    async def _receive_first(self) -> None:
        with suppress(StopAsyncIteration):
            self._received.append(await self._receive())

    async def _receive(self) -> Chunk:
        if self._received:
            return self._received.popleft()
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            if asyncio.get_running_loop() is not self._loop:
                raise RuntimeError("this stream belongs to another event loop, which has closed it") from None
            self._has_ended = True
            raise
        except (JobFailed, JobNotFound):
            self._has_ended = True
            raise
        except ResultTimeout as exc:
            await self.aclose()
            is_cancelled = self._cancelling is not None and self._cancelling.result()
            raise await self._owner.explain(exc, self.job, is_cancelled=is_cancelled) from exc
        except BaseException:
            self._cancel_soon()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def text(self) -> AsyncGenerator[str, None]:
        """Yield the text of each chunk that has text. Closing this iterator early closes the stream.

        Web frameworks accept it as the body of a response: `StreamingResponse(stream.text())`.
        """
        try:
            async for chunk in self:
                if chunk.text:
                    yield chunk.text
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the stream. If its job has not ended, cancel it and wait until the cancellation is sent."""
        self._received.clear()
        # A separate task cancels the job, because the task that closes this stream may itself be cancelled.
        self._cancel_soon()
        with suppress(RuntimeError):  # another task reads the stream: it gets the end of the job
            await self._chunks.aclose()
        if self._cancelling is not None:
            await asyncio.wait([self._cancelling])

    def _cancel_soon(self) -> None:
        """Start the cancellation of the job, in the event loop of its connections."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._loop.is_closed() or asyncio.get_running_loop() is self._loop:
            self._cancelling = self._owner.cancel_soon(self.job)
        else:
            self._loop.call_soon_threadsafe(self._owner.cancel_soon, self.job)

    def __del__(self) -> None:
        # The reader left without closing the stream: for example, a web framework dropped the body of a response.
        if self._has_ended:
            return
        try:
            is_in_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_in_loop = False
        if is_in_loop:
            self._owner.cancel_soon(self.job)  # started now, so that a close of the client waits for it
        else:  # the garbage collector runs in any thread
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._owner.cancel_soon, self.job)
