"""How a claimed job leaves this worker: its end is stored, it is requeued or retried, or its lease is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from redis.exceptions import ResponseError

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.script_types import FinishReply, JobEntry, TerminalWrite
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.worker.broker.claimed_jobs import ClaimedJobs
from llamaq.worker.broker.concurrent_calls import run_all
from llamaq.worker.broker.engine_controls import EngineControls
from llamaq.worker.broker.job_progress import JobProgress
from llamaq.worker.broker.outbox_settings import RetryDelay
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.engine_loop.telemetry import EndedJob

log = logging.getLogger(__name__)

REPORTED_BY_OTHERS = (ErrorCode.POISON, ErrorCode.DAMAGED)
"""Errors of jobs that became dead letters. The worker that writes the dead letter reports the end of the job."""


class JobDepartures:
    """Writes the ends, requeues and retries of jobs to Redis, and removes these jobs from the claimed jobs."""

    def __init__(
        self,
        scripts: WorkerScripts,
        jobs: ClaimedJobs,
        engine: EngineControls,
        room_freed: asyncio.Event,
        retry_delay: RetryDelay,
        on_finished: Callable[[EndedJob], None],
    ) -> None:
        """Create the object.

        Args:
            scripts: The scripts that write to Redis.
            jobs: The claimed jobs.
            engine: The engine thread's controls.
            room_freed: Set when a job has left, so that the intake may claim another job.
            retry_delay: How long a job that failed waits before it is retried.
            on_finished: Called for each job whose end is stored.
        """
        self._scripts = scripts
        self._jobs = jobs
        self._engine = engine
        self._room_freed = room_freed
        self._retry_delay = retry_delay
        self._on_finished = on_finished
        self.has_crashed = False
        """Whether the engine thread has crashed. Then the crash counts against each requeued job without a stored
        token."""

    async def finish(self, ends: list[tuple[JobProgress, TerminalWrite]], now_s: float) -> None:
        """Write the last tokens and the terminal events of jobs that have ended."""
        lost: list[JobProgress] = []
        error: ResponseError | None = None
        while ends:
            outcomes = await self._scripts.finish_jobs([(job.next_flush(now_s), write) for job, write in ends])
            again = []
            for (job, write), outcome in zip(ends, outcomes, strict=True):
                match outcome:
                    case FinishReply("ok"):
                        self._record_end(job, write)
                    case FinishReply("resend", stored):  # the reply to a flush was lost, or Redis has lost tokens
                        log.info("job.tokens_resent id=%s stored=%d", job.lease.job_id, stored)
                        job.set_stored(stored, now_s)
                        again.append((job, write))
                    case FinishReply():
                        lost.append(job)
                    case _ if is_job_key_error(outcome):
                        # The entry stays pending. The worker that claims it next moves it to the dead letters.
                        log.error("job.unwritable id=%s error=%s", job.lease.job_id, outcome)
                        lost.append(job)
                    case _:
                        error = outcome
            ends = again
        await run_all(map(self.drop_lost, lost))
        if error is not None:
            raise error

    def _record_end(self, job: JobProgress, write: TerminalWrite) -> None:
        """Remove a job whose end is stored, and report it."""
        log.info("job.%s id=%s", write.status, job.lease.job_id)
        self._jobs.remove(job)
        self._room_freed.set()
        self._on_finished(job.describe_end(self._scripts.worker, write.end))

    async def requeue(self, job: JobProgress) -> None:
        """Requeue a claimed job, so that another worker takes it at once, or later if it has failed."""
        lease = job.lease
        if job.retried_error is not None:
            await self._retry(job, job.retried_error)
            return
        entry = JobEntry(lease.job_id, lease.stream, lease.entry_id)
        accepted = await self._scripts.requeue(entry, lease.attempt, crashed=self.has_crashed)
        if not accepted:
            await self.drop_lost(job)
            return
        log.info("job.requeued id=%s", lease.job_id)
        self._jobs.remove(job)

    async def _retry(self, job: JobProgress, error: Failed) -> None:
        """Let a job that has failed be retried later."""
        delay_ms = await self._scripts.retry(
            job.next_flush(time.monotonic()),
            error,
            first_delay_s=self._retry_delay.first_s,
            max_delay_s=self._retry_delay.longest_s,
            share=random.uniform(0.5, 1.0),
        )
        if delay_ms is None:
            await self.drop_lost(job)
            return
        log.info("job.retried_later id=%s code=%s delay_ms=%d", job.lease.job_id, error.code, delay_ms)
        self._jobs.remove(job)
        self._room_freed.set()

    async def drop_lost(self, job: JobProgress) -> None:
        """Drop an attempt that may no longer write, in the outbox and in the engine. Report the end of an ended job.

        A client or another worker may end a job that waits here for a slot, when `cancel` is called or at a deadline.
        """
        lease = job.lease
        self._engine.release(lease)
        end = await self._scripts.read_end(lease.job_id, lease.attempt)
        if job not in self._jobs:
            return  # a newer attempt was registered meanwhile
        log.info("job.%s id=%s attempt=%d", "lost" if end is None else "ended_in_redis", lease.job_id, lease.attempt)
        self._jobs.remove(job)
        self._room_freed.set()
        if end is not None and end.error_code not in REPORTED_BY_OTHERS:
            self._on_finished(job.describe_end(self._scripts.worker, end))

    def __repr__(self) -> str:
        return f"<JobDepartures of {self._jobs!r}>"
