"""The script calls about claimed jobs, with those for moves, crashes, retries and stats, which only workers need."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from redis.exceptions import ResponseError

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.attempt_scripts import DEAD_TTL_S, MAX_DEAD, AttemptScripts
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, JobId, Keys
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.protocol.script_source import source
from llamaq.common.protocol.script_types import JobEntry, JobFlush, StoredEnd
from llamaq.common.redis.write_refusals import is_job_key_error

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOVE_AFTER_S, MAX_MOVE_AFTER_S = 1.0, 30.0
"""How long a job that waits in a worker stays there although another worker has a free slot, and the upper bound of
this time. The time is multiplied by the `move_factor` of the job (see _lib.lua)."""
MAX_WAITING_EXAMINED = 100
"""Upper bound on the waiting entries of one stream that are examined for a worker with a free slot."""
MAX_STATS = 10_000
"""Approximate upper bound on the ended jobs whose stats a queue stores."""
CrashVerdict = Literal["ok", "suspect", "dead", "stale", "unsure"]
"""What a worker must do with a reclaimed job; check_crash.lua explains the values."""


class WorkerScripts(AttemptScripts):
    """Calls all scripts that a worker needs for its jobs.

    Each method raises `RedisError` if Redis cannot execute its script.
    """

    def __init__(self, redis: Redis, keys: Keys, worker: str) -> None:
        super().__init__(redis, keys, worker)
        self._movable, self._check_crash, self._bury, self._requeue, self._retry, self._add_stats = (
            redis.register_script(source(name, __package__))
            for name in ("movable", "check_crash", "bury", "requeue", "retry", "add_stats")
        )

    async def movable_jobs(self, queue: str, partition: int, count: int, *, max_crashes: int) -> list[JobEntry]:
        """Return the entries of jobs that wait for a slot in other workers, with the numbers of their attempts.

        An entry that another client of Redis wrote may name no job of the partition. It is left out: when its lease has
        expired, the worker that reclaims it makes a dead letter of it.

        Args:
            queue: Name of the queue.
            partition: The partition.
            count: Number of jobs to return at most.
            max_crashes: A job fails after this many crashes. Jobs that are one crash away from this limit are not
                returned.
        """
        times_ms = [int(MOVE_AFTER_S * 1000), int(MAX_MOVE_AFTER_S * 1000)]
        reply = await self._movable(
            keys=[self._keys.jobs(queue, partition, priority) for priority in Priority],
            args=[GROUP, self.worker, count, MAX_WAITING_EXAMINED, *times_ms, max_crashes],
        )
        return [
            JobEntry(str(job_id), stream.decode(), entry.decode(), int(attempt))
            for stream, entry, stored, attempt in reply
            if (job_id := JobId.find(stored, queue, partition)) is not None
        ]

    async def check_crash(
        self,
        entry: JobEntry,
        *,
        last_worker: str,
        silent_ms: int,
        dead_after_s: float,
        max_crashes: int,
    ) -> CrashVerdict:
        """Check whether the last worker of a job died with the job, and count the death.

        Args:
            entry: The entry, which this worker has taken from another worker.
            last_worker: Id of the worker that claimed the job last; empty: the job is not at risk.
            silent_ms: Age of the last worker's last heartbeat, in milliseconds.
            dead_after_s: Age of a heartbeat, in seconds, from which its worker counts as dead.
            max_crashes: Number of deaths in a row that end the job. A job with one death fewer is a suspect, which runs
                only while no other job runs. At least two deaths are required, so that every job runs once as a
                suspect.
        """
        keys = self._keys.of_job(entry.job_id)
        job_id = JobId.parse(entry.job_id)
        reply = await self._check_crash(
            keys=[keys.job, keys.events, entry.stream, self._keys.dead(job_id.queue, job_id.partition)],
            args=[
                entry.entry_id,
                GROUP,
                keys.channel,
                entry.job_id,
                self.worker,
                last_worker,
                silent_ms,
                int(dead_after_s * 1000),
                max(1, max_crashes - 1),
                DEAD_TTL_S * 1000,
                MAX_DEAD,
            ],
        )
        verdict: CrashVerdict = reply.decode()
        return verdict

    async def bury(self, entry: JobEntry, attempt: int | None, error: Failed) -> bool:
        """Fail a job whose data in Redis were damaged, and make a dead letter of it.

        Args:
            entry: The entry of the job, which this worker has taken.
            attempt: Number of this worker's attempt. None: the job could not be claimed.
            error: The error of the job.

        Returns:
            Whether the job has ended now. False: a newer attempt exists, or the job had already ended.
        """
        keys = self._keys.of_job(entry.job_id)
        job_id = JobId.parse(entry.job_id)
        reply = await self._bury(
            keys=[keys.job, keys.events, entry.stream, self._keys.dead(job_id.queue, job_id.partition)],
            args=[
                "" if attempt is None else attempt,
                self.worker,
                GROUP,
                entry.entry_id,
                keys.channel,
                entry.job_id,
                error.code,
                error.message,
                DEAD_TTL_S * 1000,
                MAX_DEAD,
            ],
        )
        return bool(reply == b"ok")

    async def requeue(self, entry: JobEntry, attempt: int | None, *, crashed: bool = False) -> bool:
        """Requeue a job, so that another worker can take it at once. A job whose cancel was accepted ends instead.

        Args:
            entry: The entry of the job.
            attempt: Number of this worker's attempt. None: the worker has read the entry and not claimed the job.
            crashed: Whether this worker crashed, which counts as a death.

        Returns:
            Whether the job was requeued. False: a newer attempt exists, or the job has ended, perhaps here.
        """
        reply = await self._requeue(
            keys=[self._keys.of_job(entry.job_id).job, entry.stream],
            args=[
                "" if attempt is None else attempt,
                GROUP,
                entry.entry_id,
                self.worker,
                int(crashed),
            ],
        )
        return bool(reply == b"ok")

    async def retry(
        self, last: JobFlush, error: Failed, *, first_delay_s: float, max_delay_s: float, share: float
    ) -> int | None:
        """Schedule a retry of a job whose attempt failed. All tokens of the job are stored already.

        Args:
            last: The attempt of this worker.
            error: The failure.
            first_delay_s: Delay of the first retry of the job, in seconds. Each further retry doubles it.
            max_delay_s: Upper bound on the delay, in seconds.
            share: Share of the delay that is used, from 0.5 to 1.

        Returns:
            The delay in milliseconds. None: the job will not be retried, because it was cancelled, it has ended, or a
            newer attempt exists.
        """
        keys = self._keys.of_job(last.job_id)
        reply = await self._retry(
            keys=[keys.job, keys.events, last.stream],
            args=[
                last.attempt,
                self.worker,
                GROUP,
                last.entry_id,
                keys.channel,
                codec.encode_event(error),
                int(first_delay_s * 1000),
                int(max_delay_s * 1000),
                share,
            ],
        )
        return int(reply) if reply >= 0 else None

    async def read_end(self, job_id: str, attempt: int) -> StoredEnd | None:
        """Return how a claimed job has ended. For example, a client may have ended it while this worker had it.

        Args:
            job_id: Id of the job.
            attempt: Number of this worker's attempt.

        Returns:
            None when the job has not ended in this attempt, or is no longer stored.
        """
        fields: Any = ["status", "attempt", "worker", "finish_reason", "error"]
        try:
            stored: Any = await self._redis.hmget(self._keys.of_job(job_id).job, fields)
        except ResponseError as exc:
            if not is_job_key_error(exc):
                raise
            return None  # another client has overwritten the job
        status, number, holder, reason, error = stored
        if number != str(attempt).encode() or holder != self.worker.encode():
            return None
        if status == b"finished" and reason:
            return StoredEnd(FinishReason(reason.decode()), None)
        with suppress(ProtocolError):  # another client has overwritten the error
            event = codec.decode_event(error) if status == b"failed" and error else None
            return StoredEnd(None, event.code) if isinstance(event, Failed) else None
        return None

    async def add_stats(self, queue: str, jobs: Sequence[RecentJob]) -> None:
        """Add ended jobs to the stats of a queue. A repeated call adds them twice; this affects only the stats."""
        entries = [codec.encode_model(job) for job in jobs]
        await self._add_stats(keys=[self._keys.stats(queue)], args=[MAX_STATS, codec.encode_values(entries)])
