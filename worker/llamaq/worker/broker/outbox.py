"""Writes the tokens and the terminal events of jobs to Redis, and renews the leases of jobs.

While a flush runs, the engine continues to tick, and the next flush writes the tokens of all these ticks together. A
slow Redis therefore leads to larger events, and does not slow the engine. While Redis is unreachable or full, all
output stays in memory and is written afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from llamaq.common.backoff import Backoff
from llamaq.common.errors import JobRejected
from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL, Attempt, TerminalWrite
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.write_refusals import is_full
from llamaq.common.split_by_size import split_by_size
from llamaq.worker.broker.claimed_jobs import ClaimedJobs
from llamaq.worker.broker.concurrent_calls import first_error, run_all
from llamaq.worker.broker.engine_controls import EngineControls
from llamaq.worker.broker.job_departures import JobDepartures
from llamaq.worker.broker.job_flushes import JobFlushes
from llamaq.worker.broker.job_progress import JobProgress
from llamaq.worker.broker.outbox_settings import OutboxSettings
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.core.job import Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded, NewToken, PromptAdvanced, PromptScored, SlotAcquired, SlotLost
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn, Message, OutputMailbox
from llamaq.worker.engine_loop.telemetry import EndedJob

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Longest time between two flushes in seconds. A flush of all jobs detects cancelled jobs and lost leases."""
WHOLE_EVERY_S = 0.005
"""A flush has all jobs if the last flush of all jobs is older than this. Otherwise it has only the jobs with news."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
MAX_BYTES_IN_CALL = 1024 * 1024
"""Largest size of the outputs that one call of `finish.lua` stores, unless one output is larger."""
OUTAGE_S = 1.0
"""If a flush takes longer than this, Redis had an outage."""


@dataclass(slots=True, eq=False)
class _Partition:
    """The flushes of one partition."""

    backoff: Backoff
    flush_needed: asyncio.Event = field(default_factory=asyncio.Event)
    job_registered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a job was registered since the partition had no job."""
    job_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a job has ended since the last flush began."""
    renewed_s: float = 0.0
    """When the leases were renewed."""
    whole_s: float = 0.0
    """When all jobs were last flushed, including those without news."""
    has_outage: bool = False
    """Whether the last flush failed, and the partition still has jobs."""
    outage_ended_s: float = 0.0
    """When the last outage ended."""


class Outbox:
    """Writes what the jobs of one worker generate to Redis, and renews their leases.

    A job is registered here from its claim until its terminal event is stored, the job is requeued, or its lease is
    lost. `Intake` registers jobs and `OutputMailbox` delivers what the engine thread generates for them. The outbox
    decides when a partition is flushed. `JobFlushes` writes the tokens of running jobs, and `JobDepartures` their ends.

    Threads: all methods run on the I/O thread. The engine thread reaches the outbox through the mailbox only.
    """

    def __init__(
        self,
        scripts: WorkerScripts,
        engine: EngineControls,
        outputs: OutputMailbox,
        settings: OutboxSettings,
        *,
        is_alive: Callable[[], bool],
        on_finished: Callable[[EndedJob], None],
    ) -> None:
        """Create the outbox and attach it to the mailbox. `run` starts the flushes.

        Args:
            scripts: The scripts that write to Redis.
            engine: The engine thread's controls.
            outputs: The mailbox that the engine thread writes to.
            settings: How long leases last, when tokens are stored, and when jobs are cancelled or retried.
            is_alive: Returns whether the engine runs ticks. No lease is renewed while the engine hangs.
            on_finished: Called for each job whose end is stored.
        """
        self._engine = engine
        self._settings = settings
        self._outage_log = OutageLog(log, "outbox")
        self._is_alive = is_alive
        self._jobs = ClaimedJobs()
        self._partitions: dict[int, _Partition] = {}
        self._partition_added = asyncio.Event()
        self.room_freed = asyncio.Event()
        """Set when a job has left the engine or will not reach it, so that the intake may claim another job."""
        self._departures = JobDepartures(
            scripts, self._jobs, engine, self.room_freed, settings.retry_delay, on_finished
        )
        self._flushes = JobFlushes(scripts, engine, self._departures, settings, self._request_flush)
        outputs.attach(self._receive)

    @property
    def n_running(self) -> int:
        """Number of registered jobs that have not ended, with or without a slot."""
        return self._jobs.n_running

    @property
    def n_claimed(self) -> int:
        """Number of jobs that count against the capacity of this worker. During an outage of Redis, ended jobs count.

        Redis does not store the ends of jobs during the outage. A worker that replaced these jobs by new jobs would
        claim more and more jobs.
        """
        return self.n_jobs if self._has_outage else self.n_running

    @property
    def n_interactive(self) -> int:
        """Number of registered interactive jobs that have not ended. During an outage of Redis, all jobs count.

        During the outage, bulk jobs cannot be requeued to make room for interactive jobs.
        """
        if self._has_outage:
            return self.n_jobs
        return self._jobs.n_running_interactive

    @property
    def n_jobs(self) -> int:
        """Number of registered jobs, including ended jobs whose end is not stored yet."""
        return len(self._jobs)

    def n_stored_tokens(self, job_id: str) -> int | None:
        """Return how many tokens of a job Redis has stored; None when the job is not registered."""
        job = self._jobs.get(job_id)
        return None if job is None else job.stored.n_tokens

    # ---- registering jobs: called by the intake

    def register(self, lease: Lease, attempt: Attempt, times: JobTimes) -> None:
        """Register a claimed job, before it is prepared. It replaces an earlier attempt, which has lost its lease.

        From now on flushes renew its lease and check whether it was cancelled, also during a long preparation. The
        first of them comes within `POLL_S`, or with the next news of any job.

        Args:
            lease: The lease of the attempt.
            attempt: The attempt.
            times: When the job was submitted, when it must end, and how long it has had a slot.
        """
        if (replaced := self._jobs.get(lease.job_id)) is not None:
            self._engine.release(replaced.lease)
        self._jobs.put(JobProgress(lease, attempt, times))
        if lease.partition not in self._partitions:
            self._partitions[lease.partition] = _Partition(Backoff(FIRST_BACKOFF_S, self._longest_backoff_s))
            self._partition_added.set()
        self._partitions[lease.partition].job_registered.set()

    def set_prepared(self, prepared: PreparedJob) -> bool:
        """Record that a registered job is ready for the engine.

        Returns:
            True when the engine may run the job. False when its lease was lost or it was requeued during the
            preparation.
        """
        registered = self._jobs.of(prepared.job.lease)
        if registered is None or registered.must_requeue:
            return False  # the engine was told to drop a requeued job before it had the job
        registered.prepare(prepared, self._settings.checkpoints)
        return True

    def reject(self, lease: Lease, error: JobRejected) -> None:
        """End a registered job that could not be prepared."""
        job = self._jobs.of(lease)
        if job is not None:
            if not job.plan_retry(error):
                job.fail(error)
            self._request_flush()
            self.room_freed.set()

    def requeue(self, lease: Lease) -> None:
        """Requeue a job for other workers, and drop it in the engine, unless it has ended or its lease is lost."""
        job = self._jobs.of(lease)
        if job is not None and job.terminal_write is None and not job.must_requeue:
            job.ask_requeue()
            self._engine.release(lease)
            self._request_flush()

    def requeue_all(self, *, except_for: Lease) -> None:
        """Requeue all jobs except one. May be called repeatedly."""
        for job in self._jobs:
            if job.lease is not except_for:
                self.requeue(job.lease)

    def is_registered(self, lease: Lease) -> bool:
        """Return whether this attempt is registered: it has not ended, and its lease is not lost."""
        return self._jobs.of(lease) is not None

    # ---- messages of the engine thread

    def _receive(self, messages: Sequence[Message]) -> None:
        for message in messages:
            job = self._jobs.of(message.job.lease)
            if job is None:
                continue  # the outbox has dropped this attempt, because its lease was lost
            if isinstance(message, NewToken):  # most messages
                job.add_token(message)
            elif isinstance(message, JobWithdrawn):
                job.ask_requeue()
            elif isinstance(message, SlotAcquired):
                job.gain_slot()
            elif isinstance(message, SlotLost):
                job.lose_slot()
            elif isinstance(message, PromptAdvanced):
                job.add_prompt_progress(message.progress)
            elif isinstance(message, PromptScored):
                job.output.prompt_logprobs = message.prompt_logprobs
            elif isinstance(message, JobEnded):
                job.end(message)
                self._partitions[job.lease.partition].job_ended.set()
                self.room_freed.set()
        self._request_flush()

    # ---- flushes

    @property
    def _has_outage(self) -> bool:
        return any(partition.has_outage for partition in self._partitions.values())

    @property
    def _longest_backoff_s(self) -> float:
        return min(MAX_BACKOFF_S, self._settings.renew_every_s)

    def _request_flush(self) -> None:
        for partition in self._partitions.values():
            partition.flush_needed.set()

    async def run(self) -> None:
        """Flush each partition on its own, until cancelled. A partition that does not answer delays no other."""
        started: set[int] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for number in self._partitions.keys() - started:
                    started.add(number)
                    tasks.create_task(self._run_partition(number))
                self._partition_added.clear()
                await self._partition_added.wait()

    async def _run_partition(self, number: int) -> None:
        """Flush one partition after every message, and every `POLL_S` while it has registered jobs."""
        partition = self._partitions[number]
        while True:
            if not self._jobs.of_partition(number):
                partition.has_outage = False  # it has nothing to write, and must not limit the jobs of other partitions
                partition.job_registered.clear()
                await partition.job_registered.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await partition.flush_needed.wait()
            partition.flush_needed.clear()
            partition.job_ended.clear()
            started_s = time.monotonic()
            is_whole = partition.has_outage or started_s - partition.whole_s >= WHOLE_EVERY_S
            try:
                await self._flush_partition(number, only_news=not is_whole)
            except RedisError as exc:
                partition.has_outage = True
                self._outage_log.record_failure(exc)
                partition.flush_needed.set()
                await self._wait_to_retry(partition, exc)
            else:
                if partition.has_outage or time.monotonic() - started_s > OUTAGE_S:
                    partition.outage_ended_s = time.monotonic()
                partition.has_outage = False
                partition.backoff.reset()
                if not self._has_outage:
                    self._outage_log.record_success()

    async def _wait_to_retry(self, partition: _Partition, error: RedisError) -> None:
        """Wait before the next flush after an error. A full Redis accepts ends, so the end of a job stops the wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(partition.backoff.next_delay_s()):
                await (partition.job_ended if is_full(error) else asyncio.Event()).wait()

    async def flush(self) -> None:
        """Write all due tokens and ends that Redis has not stored yet. May be repeated after a failure.

        Raises:
            RedisError: A partition is unreachable, or refused a write. The other partitions were flushed.
        """
        await run_all(self._flush_partition(number) for number in self._partitions)

    async def _flush_partition(self, number: int, *, only_news: bool = False) -> None:
        partition, jobs, now_s = self._partitions[number], self._jobs.of_partition(number), time.monotonic()
        renew = now_s - partition.renewed_s >= self._settings.renew_every_s and self._is_alive()
        is_whole = renew or not only_news
        running = [job for job in jobs if job.terminal_write is None and (is_whole or job.has_news(now_s))]
        flushes = [(job, job.next_flush(now_s)) for job in running]  # now, because a job may end during the calls
        outage_ended_s = None if partition.has_outage else partition.outage_ended_s
        flushed = [self._flushes.write(flushes, now_s, renew=renew, outage_ended_s=outage_ended_s)] if running else []
        # A full Redis refuses the tokens of the running jobs, and accepts ends and requeues, which let jobs end.
        ended = [(job, job.terminal_write) for job in jobs if job.terminal_write is not None]
        calls = split_by_size(ended, _output_bytes, max_items=MAX_JOBS_IN_CALL, max_bytes=MAX_BYTES_IN_CALL)
        ends = [self._departures.finish(part, now_s) for part in calls]
        error = await first_error(flushed + ends)
        if error is None or is_full(error):
            await run_all(self._departures.requeue(job) for job in running if job.can_requeue and job in self._jobs)
        if error is not None:
            raise error
        if renew:
            partition.renewed_s = now_s
        if is_whole:
            partition.whole_s = now_s

    async def close(self, *, crashed: bool = False) -> None:
        """Write all tokens and ends, then requeue the jobs that have not ended.

        A full Redis refuses tokens. Then the jobs are requeued without them.

        Args:
            crashed: Whether the engine thread has crashed. If so, the crash counts against each job without a stored
                token of this attempt.

        Raises:
            RedisError: Redis is unreachable, or refused a write.
        """
        self._departures.has_crashed = crashed
        for job in self._jobs:
            job.ask_requeue()
        await run_all(self._close_partition(number) for number in self._partitions)

    async def _close_partition(self, number: int) -> None:
        while self._jobs.of_partition(number):  # several flushes are needed when Redis has lost tokens
            try:
                await self._flush_partition(number)
            except RedisError as exc:
                if not is_full(exc):
                    raise
                # The tokens that Redis refused were not published. The next worker generates the same tokens again.
                running = [job for job in self._jobs.of_partition(number) if job.terminal_write is None]
                await run_all(map(self._departures.requeue, running))

    def __repr__(self) -> str:
        return f"<Outbox jobs={self.n_jobs} running={self.n_running}>"


def _output_bytes(end: tuple[JobProgress, TerminalWrite]) -> int:
    """Return the size of a job's output, which is most of its terminal write."""
    return len(end[1].fields.get("output", b""))
