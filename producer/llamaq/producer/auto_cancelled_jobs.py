"""Jobs that belong to one call: when the call ends early, its job is cancelled."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from math import inf
from weakref import WeakSet

from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks, drop_error
from llamaq.common.errors import JobFailed, JobNotFound, LlamaqError, NoWorker, ResultTimeout
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.keys import JobId
from llamaq.producer.auto_cancelled_stream import AsyncStream
from llamaq.producer.call_timeout import CallTimeout
from llamaq.producer.job_handle import AsyncJob
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.early_progress import EarlyProgress
from llamaq.producer.submission import new_job_id, require_worker, send

log = logging.getLogger(__name__)

LAST_WAIT_S = 0.1
"""Longest wait, after the timeout of a call, for the cancellation of its job and for the search for a worker."""
EMBEDDINGS_TTL_S = 120.0
"""How long Redis stores embeddings that a call waits for, in seconds. They are large, the call reads them at once, and
nothing reads them again. It is longer than all retries of the read."""
CLOSE_WAIT_S = 5.0
"""Longest wait for the ends of interrupted calls, and for the cancellations of their jobs."""


class AutoCancelledJobs:
    """Submits the jobs of `generate` and `stream` calls, and cancels each job whose call ends early.

    A job with an idempotency key is never cancelled, because other callers may get the same job through the key.
    """

    def __init__(self, connection: QueueConnection) -> None:
        self._connection = connection
        self._background = BackgroundTasks()
        self._streams: WeakSet[AsyncStream] = WeakSet()
        """The streams that have readers. A stream that is garbage collected cancels its job itself."""

    async def generate(self, request: JobRequest, timeout: float | None) -> Result:
        """Submit a job and wait for its result. See `AsyncClient.generate`."""
        return await self.generate_within(request, self.new_limit(timeout))

    def new_limit(self, timeout: float | None) -> CallTimeout:
        """Return the limit of a call that begins now. None: the client's `timeout_s`."""
        return CallTimeout(self._connection.timeout_s(timeout))

    async def generate_within(self, request: JobRequest, limit: CallTimeout) -> Result:
        """Submit a job and wait for its result, as a part of a call with a limit."""
        with self._connection.calls.interruptible():
            return await self._generate(request, limit)

    async def _generate(self, request: JobRequest, limit: CallTimeout) -> Result:
        is_read_once = request.embed is not None and request.idempotency_key is None
        ttl_s = EMBEDDINGS_TTL_S if is_read_once else inf
        job = await self._submit(request, limit, new_job_id(self._connection, request), ttl_s)
        try:
            return await job.result_within(limit)
        except ResultTimeout as exc:
            is_cancelled = await self.cancel_soon(job)
            raise await self.explain(exc, job, is_cancelled=is_cancelled) from exc
        except (JobFailed, JobNotFound):
            raise
        except BaseException:
            self.cancel_soon(job)
            raise

    async def stream(self, request: JobRequest, timeout: float | None) -> AsyncStream:
        """Submit a job and return the stream of its chunks. See `AsyncClient.stream`."""
        with self._connection.calls.interruptible():
            return await self._stream(request, timeout)

    async def _stream(self, request: JobRequest, timeout: float | None) -> AsyncStream:
        limit, job_id = self.new_limit(timeout), new_job_id(self._connection, request)
        early = await self._listen(str(job_id)) if request.prompt_progress else None
        try:
            job = await self._submit(request, limit, job_id)
        except BaseException:
            if early is not None:
                early.stop()
            raise
        if early is not None and early.job_id == job.id:
            job.early_progress = early
        elif early is not None:  # the idempotency key has found another job
            early.stop()
        stream = AsyncStream(job, timeout, self)
        self._streams.add(stream)
        return stream

    async def _listen(self, job_id: str) -> EarlyProgress:
        """Listen to a job that is not submitted yet: a short prompt is computed within milliseconds."""
        connection = self._connection
        early = EarlyProgress(connection.redis, connection.keys.of_job(job_id), job_id)
        try:
            await early.listen(connection.subscriber)
        except BaseException:
            early.stop()
            raise
        return early

    def cancel_soon(self, job: AsyncJob) -> asyncio.Task[bool]:
        """Cancel a job in the background, unless other callers may share it.

        Returns:
            A task that ends soon, even if Redis does not answer for a long time. Its result is whether the job was
            cancelled.
        """
        if job.early_progress is not None:
            job.early_progress.stop()
        return self._background.start(self._wait_briefly(self._background.start(self._cancel(job))))

    async def explain(self, timeout: ResultTimeout, job: AsyncJob, *, is_cancelled: bool) -> LlamaqError:
        """Return the error to raise after `timeout`. `cancel_soon` returned `is_cancelled`."""
        queue = self._connection.settings.queue
        search = self._background.start(self._connection.workers.search(queue))
        await asyncio.wait([search], timeout=LAST_WAIT_S)
        fate = "it was cancelled" if is_cancelled else "its cancellation is not confirmed"
        if job.is_shared:
            fate = "it continues, because it has an idempotency key"
        if search.done() and search.exception() is None and not search.result():
            error: LlamaqError = NoWorker(queue)
            error.args = (f"{error} (job {job.id}: {fate})",)
        else:
            search.add_done_callback(drop_error)
            error = ResultTimeout(f"{timeout}; {fate}")
        error.job_id = job.id  # type: ignore[attr-defined]
        return error

    async def aclose(self) -> None:
        """End all calls, and cancel their jobs.

        Raises:
            RuntimeError: The client belongs to another event loop, which is not closed.
        """
        calls = self._connection.calls
        calls.interrupt()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                closing = [stream.aclose() for stream in list(self._streams)]
                await asyncio.gather(calls.wait(), *closing, return_exceptions=True)
                await self._background.wait()
        if self._background:
            log.warning("client.closed: Redis has not answered all cancellations of jobs")
        await self._background.cancel()

    async def wait_for_cancellations(self) -> None:
        """Wait until all cancellations in flight are sent or have failed, but not long if Redis does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self._background.wait()

    async def _submit(
        self, request: JobRequest, limit: CallTimeout, job_id: JobId, result_ttl_s: float = inf
    ) -> AsyncJob:
        """Submit a job. If the time is over or this task is cancelled during the submit, the job is cancelled too.

        Raises:
            NoWorker: The client has `require_worker`, and no worker serves the queue. Nothing was submitted.
        """
        await require_worker(self._connection, job_id, limit)
        submitting = self._background.start(send(self._connection, request, job_id, result_ttl_s=result_ttl_s))
        try:
            await asyncio.wait([submitting], timeout=limit.remaining_s)
        except asyncio.CancelledError:  # possible also when the submit has just ended
            self._background.start(self._cancel_when_submitted(submitting))
            raise
        if not submitting.done():
            self._background.start(self._cancel_when_submitted(submitting))
            raise limit.error(str(job_id), "could not be submitted: Redis has not answered")
        return submitting.result()

    async def _cancel_when_submitted(self, submitting: asyncio.Task[AsyncJob]) -> None:
        await asyncio.wait([submitting])
        if submitting.cancelled() or submitting.exception() is not None:
            return  # nothing was submitted, or it is unknown
        await self._cancel(submitting.result())

    async def _cancel(self, job: AsyncJob) -> bool:
        if job.is_shared:
            return False
        try:
            return await job.cancel()
        except JobNotFound:
            pass
        except (RedisError, OSError) as exc:
            log.warning("job.cancel_failed id=%s error=%s", job.id, exc)
        return False

    async def _wait_briefly(self, cancelling: asyncio.Task[bool]) -> bool:
        await asyncio.wait([cancelling], timeout=LAST_WAIT_S)
        return cancelling.result() if cancelling.done() and not cancelling.cancelled() else False
