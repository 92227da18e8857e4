"""Jobs that belong to one call: when the call ends early, its job is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.errors import JobFailed, JobNotFound, LlamaqError, NoWorker, ResultTimeout
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.job import AsyncJob, Chunk
from llamaq.producer.queries.queue_snapshots import read_workers
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.submission import submit

log = logging.getLogger(__name__)


class AutoCancelledJobs:
    """Submits the jobs of `generate` and `stream` calls, and cancels each job whose call ends early.

    A job that other callers share through its idempotency key is not cancelled.
    """

    def __init__(self, connection: QueueConnection) -> None:
        self._connection = connection
        self._background = BackgroundTasks()

    async def generate(self, request: JobRequest, timeout: float | None) -> Result:
        """Submit a job and wait for its result. See `AsyncClient.generate`."""
        job = await self._submit(request)
        try:
            return await job.result(timeout=timeout)
        except ResultTimeout as exc:
            await self._cancel(job)
            raise await self._cause_of(exc) from exc
        except (asyncio.CancelledError, RedisError, OSError):
            self._background.start(self._cancel(job))
            raise

    async def stream(self, request: JobRequest, timeout: float | None) -> AsyncGenerator[Chunk, None]:
        """Submit a job and yield its chunks. See `AsyncClient.stream`."""
        job = await self._submit(request)
        chunks = job.stream(timeout=timeout)
        has_ended = False
        try:
            async for chunk in chunks:
                yield chunk
            has_ended = True
        except (JobFailed, JobNotFound):
            has_ended = True
            raise
        except ResultTimeout as exc:
            raise await self._cause_of(exc) from exc
        finally:
            await chunks.aclose()
            if not has_ended:
                # A separate task cancels the job, because the task that closes this iterator may itself be cancelled.
                await asyncio.shield(self._background.start(self._cancel(job)))

    async def wait_for_cancellations(self) -> None:
        """Wait until all cancellations in flight are sent or have failed."""
        await self._background.wait()

    async def _submit(self, request: JobRequest) -> AsyncJob:
        """Submit a job. If this task is cancelled during the submit, the job is cancelled too."""
        submitting = self._background.start(submit(self._connection, request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self._background.start(self._cancel_when_submitted(submitting))
            raise

    async def _cancel_when_submitted(self, submitting: asyncio.Task[AsyncJob]) -> None:
        await self._cancel(await submitting)

    async def _cancel(self, job: AsyncJob) -> None:
        if not job.is_new:  # other callers share it through its idempotency key
            return
        try:
            await job.cancel()
        except JobNotFound:
            pass
        except (RedisError, OSError) as exc:
            log.warning("job.cancel_failed id=%s error=%s", job.id, exc)

    async def _cause_of(self, timeout: ResultTimeout) -> LlamaqError:
        """Return the error to raise after a timeout: `NoWorker` if no worker serves the queue, else `timeout`."""
        queue = self._connection.settings.queue
        has_worker = await read_workers(self._connection.redis, self._connection.keys, queue)
        return timeout if has_worker else NoWorker(queue)
