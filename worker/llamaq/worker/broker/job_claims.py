"""Takes jobs from a queue: reads new and abandoned entries, claims the jobs, and removes unusable entries."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError, ResponseError

from llamaq.common.errors import ErrorCode, InvalidRequest
from llamaq.common.protocol.claim_scripts import ClaimScripts
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import (
    Attempt,
    Claimant,
    ClaimOutcome,
    DueJobs,
    Entry,
    JobEntry,
)
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.worker.broker.crash_check import CrashCheck
from llamaq.worker.broker.dead_letters import DeadLetters
from llamaq.worker.broker.job_streams import Entries, JobStreams
from llamaq.worker.broker.published_output import NO_OUTPUT, read_published
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.broker.worker_scripts import CrashVerdict, WorkerScripts
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.engine_loop.telemetry import EndedJob

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A claimed job and its new attempt."""

    entry: JobEntry
    attempt: Attempt
    published: TokenSpan
    """The output that earlier attempts published."""
    times: JobTimes
    """When the job was submitted, when it must end, and how long it has had a slot."""


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """What Redis has answered to the claim of one job."""

    entry: JobEntry
    outcome: ClaimOutcome
    claimed_s: float
    """About when Redis executed the claim."""

    @property
    def claimed(self) -> ClaimedJob | None:
        """The claimed job, if nothing more must be read: it has no output of earlier attempts. Otherwise None."""
        if not isinstance(self.outcome, Attempt) or self.outcome.generated:
            return None
        return ClaimedJob(self.entry, self.outcome, NO_OUTPUT, _times(self.outcome, self.claimed_s))


class JobClaims:
    """Reads the entries of one queue, claims their jobs, and requeues jobs that were not claimed.

    `Intake` decides when these methods are called and for how many jobs.
    """

    def __init__(
        self,
        queue: WorkerQueue,
        claimant: Claimant,
        *,
        max_crashes: int,
        on_finished: Callable[[EndedJob], None],
    ) -> None:
        """Create the object. `open` must be called before any other method.

        Args:
            queue: The queue to read.
            claimant: This worker. When its lease has expired without a renewal, the jobs may be reclaimed.
            max_crashes: A job fails after this many crashes in a row, if no token was stored between the crashes.
            on_finished: Called for each job that ended here, because it was damaged or has crashed its workers.
        """
        self._queue = queue
        self._claimant = claimant
        self._max_crashes = max_crashes
        self._claim_scripts = ClaimScripts(queue.redis, queue.keys)
        self._scripts = WorkerScripts(queue.redis, queue.keys, claimant.worker)
        self._streams = JobStreams(queue, claimant)
        self._crash_check = CrashCheck(queue, self._scripts, claimant, max_crashes)
        self._dead_letters = DeadLetters(queue, self._scripts, on_finished)

    async def open(self) -> None:
        """Create the consumer groups."""
        await self._streams.open()

    async def read(self, count: int, priorities: Sequence[Priority] = tuple(Priority)) -> list[ClaimReply]:
        """Claim up to `count` jobs of new entries, interactive jobs first, without a wait."""
        read_s = time.monotonic()
        while found := await self._streams.read(count, priorities):
            if replies := await self._claim_found(found, read_s):
                return replies  # otherwise all entries became dead letters, and more entries may follow
        return []

    @property
    def can_wait_and_read(self) -> bool:
        """Whether `wait_and_read` may be called."""
        return self._streams.can_wait_and_read

    def has_read_all(self, priorities: Sequence[Priority] = tuple(Priority)) -> bool:
        """Return whether the last read took all new entries of these priorities. Newer entries end the next wait."""
        return self._streams.has_read_all(priorities)

    async def wait_and_read(self, wait_s: float, count: int) -> list[ClaimReply]:
        """Wait up to `wait_s` for a new entry, then claim like `read`, in one call. `end_wait` ends the wait."""
        found = await self._streams.wait_and_read(wait_s, count)
        return await self._claim_found(found, time.monotonic())  # a wait is long, so the time of the reply is closer

    async def end_wait(self) -> None:
        """End a running call of `wait_and_read`. No other call may follow."""
        await self._streams.end_wait()

    async def _claim_found(self, found: Entries, claimed_s: float) -> list[ClaimReply]:
        """Return the claims of entries that were read. Entries that name no job of this queue become dead letters."""
        unclaimed = [(stream, [one for one in entries if one.outcome is None]) for stream, entries in found]
        replies = [
            ClaimReply(_job_entry(stream, one), one.outcome, claimed_s)
            for stream, entries in found
            for one in entries
            if one.outcome is not None
        ]
        return replies + await self._claim_rest(await self._accept_all(unclaimed))

    async def _claim_rest(self, unclaimed: Sequence[JobEntry]) -> list[ClaimReply]:
        """Claim the jobs of new entries that were read together with large requests."""
        replies: list[ClaimReply] = []
        for entry in unclaimed:
            try:
                replies += await self.claim_jobs([entry])
            except RedisError as exc:  # the entry stays pending; a worker takes it when its lease has expired
                log.warning("job.claim_failed id=%s error=%s", entry.job_id, exc)
        return replies

    async def wait(self, timeout_s: float, priorities: Sequence[Priority] = tuple(Priority)) -> None:
        """Wait up to `timeout_s` seconds for a new entry of these priorities. May return earlier without one."""
        await self._streams.wait(timeout_s, priorities)

    async def movable(self, count: int) -> list[JobEntry]:
        """Return the entries of up to `count` jobs that wait for a slot in other workers."""
        if not self._streams.open_jobs.may_exist():
            return []

        async def find(partition: int) -> list[JobEntry]:
            try:
                return await self._scripts.movable_jobs(
                    self._queue.name, partition, count, max_crashes=self._max_crashes
                )
            except RedisError as exc:  # on a cluster, the other partitions may answer
                log.debug("jobs.not_searched partition=%d error=%s", partition, exc)
                return []

        found = await asyncio.gather(*map(find, self._queue.partitions))
        return [one for jobs in found for one in jobs][:count]

    def observe(self, partition: int, due: DueJobs, waited_s: float) -> None:
        """Record a reply of a partition's server, and how long this worker has waited for it.

        Leases are not trusted while the server does not answer, or after its clock has jumped. Without open jobs, no
        jobs are searched.
        """
        self._streams.observe(partition, due, waited_s)

    def may_have_jobs(self, partition: int) -> bool:
        """Return whether a partition may have jobs that have not ended."""
        return self._streams.open_jobs.may_exist_in(partition)

    async def reclaim(self, count: int, priorities: Sequence[Priority] = tuple(Priority)) -> list[JobEntry]:
        """Take up to `count` entries that were requeued by their worker, or whose lease has expired."""
        return await self._accept_all(await self._streams.reclaim(count, priorities))

    async def _accept_all(self, found: Entries) -> list[JobEntry]:
        return [entry for stream, entries in found for entry in await self._accept(stream, entries)]

    async def _accept(self, stream: str, entries: Sequence[Entry]) -> list[JobEntry]:
        """Return the entries that name a job of this queue. The other entries become dead letters.

        If Redis refuses that, for example because it is full, such an entry stays pending. A worker takes it when its
        lease has expired. It must not prevent the start of the other jobs, which are claimed already.
        """
        accepted = []
        for one in entries:
            try:
                job_id = JobId.parse(one.fields.get(b"id", b"").decode("ascii", "replace"))
                if (job_id.queue, job_id.partition) != (self._queue.name, self._queue.partition_of(stream)):
                    raise InvalidRequest(f"the job belongs to queue {job_id.queue!r}, partition {job_id.partition}")
            except InvalidRequest as exc:
                try:
                    await self._dead_letters.bury_entry(stream, one.entry_id.decode(), one.fields, str(exc))
                except RedisError as error:
                    log.warning("entry.not_dead_lettered stream=%s entry=%s error=%s", stream, one.entry_id, error)
                continue
            accepted.append(JobEntry(str(job_id), stream, one.entry_id.decode()))
        return accepted

    async def check_crash(self, entry: JobEntry) -> CrashVerdict:
        """Check whether the last worker of a reclaimed job crashed, and count the crash; see `CrashCheck.check`."""
        verdict = await self._crash_check.check(entry)
        if verdict == "dead":
            await self._dead_letters.report_end(entry.job_id, ErrorCode.POISON)
        return verdict

    async def requeue(self, entry: JobEntry) -> None:
        """Requeue a job that has not been claimed, so that another worker takes it at once."""
        await self._scripts.requeue(entry, None)

    async def claim_jobs(self, entries: Sequence[JobEntry], *, at_risk: bool = True) -> list[ClaimReply]:
        """Claim the jobs of entries of one partition, in one call.

        Args:
            entries: The entries.
            at_risk: Whether the jobs are prepared at once, so that a crash of this worker counts against them.

        Returns:
            The replies for the first entries, in the same order: `complete` returns the claimed job. Call again for the
            other entries, if there are any.

        Raises:
            RedisError: Redis is unreachable, or refuses writes.
        """
        claimed_s = time.monotonic()
        outcomes = await self._claim_scripts.claim_jobs(entries, self._claimant, at_risk=at_risk)
        return [ClaimReply(entry, outcome, claimed_s) for entry, outcome in zip(entries, outcomes, strict=False)]

    async def complete(self, reply: ClaimReply) -> ClaimedJob | None:
        """Return the claimed job, with the output of its earlier attempts.

        Returns:
            None when the job was not claimed: it does not exist, has ended, was cancelled, has reached a deadline, no
            longer waits in the attempt that its entry names, was begun by another model, or is unusable. The entry of a
            missing or unusable job is moved to the dead letters.

        Raises:
            RedisError: Redis is unreachable, or refuses to execute the claim.
        """
        entry, outcome = reply.entry, reply.outcome
        if isinstance(outcome, Attempt):
            published = NO_OUTPUT
            if outcome.generated:
                published = await read_published(self._queue, entry.job_id)
            if len(published.tokens) == outcome.generated:
                return ClaimedJob(entry, outcome, published, _times(outcome, reply.claimed_s))
            counts = f"the hash counts {outcome.generated} tokens, the events contain {len(published.tokens)}"
            await self._dead_letters.bury_job(entry, outcome.number, f"the job's events are damaged: {counts}")
        elif isinstance(outcome, ResponseError):
            if not is_job_key_error(outcome):
                raise outcome  # the fault is not in the job
            await self._dead_letters.bury_job(entry, None, f"the job's hash is damaged: {outcome}")
        elif outcome == "left":
            log.info("job.left id=%s: another model has begun it (--other-model)", entry.job_id)
        elif outcome == "gone":
            events = self._queue.keys.of_job(entry.job_id).events
            await self._queue.redis.unlink(events)  # no other call deletes them
            await self._dead_letters.bury_entry(
                entry.stream, entry.entry_id, {b"id": entry.job_id.encode()}, "the job does not exist"
            )
        return None

    async def claim_job(self, entry: JobEntry, *, at_risk: bool = True) -> ClaimedJob | None:
        """Claim the job of one entry: `claim_jobs` and `complete`."""
        (reply,) = await self.claim_jobs([entry], at_risk=at_risk)
        return await self.complete(reply)

    async def close(self) -> None:
        """End the waits for new entries."""
        await self._streams.close()


def _job_entry(stream: str, one: Entry) -> JobEntry:
    """Return an entry whose job was claimed with the read: `read.lua` has checked the job id."""
    return JobEntry(one.fields[b"id"].decode(), stream, one.entry_id.decode())


def _times(attempt: Attempt, claimed_s: float) -> JobTimes:
    """Return the times of an attempt on the clock of the worker, on which the job was claimed at `claimed_s`."""
    return JobTimes(
        submitted_s=claimed_s - attempt.waited_ms / 1000,
        deadline_s=None if attempt.left_ms is None else claimed_s + attempt.left_ms / 1000,
        queue_ms=attempt.queue_ms,
        slot_s=attempt.slot_ms / 1000,
    )
