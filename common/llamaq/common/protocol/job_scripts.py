"""The script calls that submit and change jobs, and end jobs at their deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_source import source
from llamaq.common.protocol.script_types import (
    CancelCode,
    DueJobs,
    ExpireCode,
    OtherKind,
    OtherPartitions,
    PriorityCode,
    Submission,
    SubmitConflict,
    SubmitDraining,
    SubmitQueueFull,
    SubmitReply,
    Submitted,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis


def _limit_ms(limit_s: float | None) -> int:
    """Return a time in milliseconds; 0 for no limit or no delay."""
    return 0 if limit_s is None else max(1, int(limit_s * 1000))


def _submit_reply(reply: list[Any]) -> SubmitReply:
    if reply[0] == b"partitions":
        return OtherPartitions(int(reply[1]))
    if reply[0] == b"kind":
        return OtherKind(JobKind(reply[1].decode()))
    if reply[0] == b"full":
        return SubmitQueueFull(int(reply[1]), int(reply[2]))
    if reply[0] == b"conflict":
        return SubmitConflict(reply[1].decode())
    if reply[0] == b"draining":
        return SubmitDraining()
    return Submitted(reply[1].decode(), existing=reply[0] == b"same")


class JobScripts:
    """Calls the scripts that submit and change jobs. Each method raises `RedisError` if Redis cannot execute them."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._submit, self._cancel, self._set_priority, self._position = (
            redis.register_script(source(name)) for name in ("submit", "cancel", "set_priority", "position")
        )
        self._due, self._expire, self._purge_dead_letter = (
            redis.register_script(source(name)) for name in ("due", "expire", "purge_dead_letter")
        )

    async def submit(self, submission: Submission) -> SubmitReply:
        """Put a job into its queue."""
        return _submit_reply(await self._send_submit(submission))

    async def submit_many(self, submissions: Sequence[Submission]) -> list[SubmitReply | RedisError]:
        """Put several jobs into their queues, in one round trip.

        Returns:
            The reply to each job, in order, or the error of Redis.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            for one in submissions:
                await self._send_submit(one, client=pipe)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return [reply if isinstance(reply, RedisError) else _submit_reply(reply) for reply in replies]

    async def _send_submit(self, submission: Submission, *, client: Redis | None = None) -> Any:
        """Call `submit.lua`. With a pipeline as `client`, the call is only added to the pipeline."""
        job_id, request = submission.job_id, submission.request
        key = request.idempotency_key
        keys = self._keys.of_job(str(job_id))
        streams = {Priority.INTERACTIVE: keys.interactive, Priority.BULK: keys.bulk}
        return await self._submit(
            keys=[
                keys.job,
                streams.pop(request.priority),
                *streams.values(),
                self._keys.config(job_id.queue, job_id.partition),
                self._keys.idempotency(job_id.queue, job_id.partition, key or ""),
            ],
            args=[
                str(job_id),
                submission.payload,
                request.priority.value,
                GROUP,
                max(1, int(submission.result_ttl_s * 1000)),
                "" if key is None else codec.digest_of(request),
                _limit_ms(request.queue_timeout_s),
                codec.encode_returned(request),
                int(submission.event_ttl_s * 1000),
                _limit_ms(request.deadline_s),
                _limit_ms(request.timeout_s),
                submission.partitions,
                _limit_ms(request.delay_s),
                _limit_ms(request.run_at),
                request.retries,
                request.tenant or "",
                request.kind.value,
                int(request.cancel_on_disconnect),
            ],
            client=client,
        )

    async def cancel(self, job_id: str, *, only_waiting: bool = False) -> CancelCode:
        """Cancel a waiting or preempted job, and a running job unless `only_waiting` is true."""
        keys = self._keys.of_job(job_id)
        reply = await self._cancel(
            keys=[keys.job, keys.events, keys.interactive, keys.bulk],
            args=[GROUP, keys.channel, int(only_waiting)],
        )
        code: CancelCode = reply.decode()
        return code

    async def set_priority(self, job_id: str, priority: Priority) -> PriorityCode:
        """Change the priority of a job that has no slot."""
        keys = self._keys.of_job(job_id)
        streams = {Priority.INTERACTIVE: keys.interactive, Priority.BULK: keys.bulk}
        reply = await self._set_priority(
            keys=[keys.job, streams.pop(priority), *streams.values()], args=[job_id, priority.value, GROUP]
        )
        code: PriorityCode = reply.decode()
        return code

    async def position(self, job_id: str) -> int | None:
        """Return an upper bound on the number of jobs that get a slot before a job. None: the job does not wait."""
        keys = self._keys.of_job(job_id)
        reply: Any = await self._position(keys=[keys.job, keys.interactive, keys.bulk], args=[GROUP])
        return int(reply) if reply >= 0 else None

    async def due_jobs(self, queue: str, partition: int, count: int) -> DueJobs:
        """Give jobs that are due their entries, and find jobs whose deadline has passed: at most `count` of each."""
        keys = [self._keys.deadlines(queue, partition), self._keys.later(queue, partition)]
        now_ms, n_given, n_open, *expired = await self._due(keys=keys, args=[count])
        return DueJobs(int(now_ms), int(n_given), int(n_open), expired)

    async def expire(self, job_id: str) -> ExpireCode:
        """End a job that has reached a deadline, or give a job its entry if it is due."""
        keys = self._keys.of_job(job_id)
        reply = await self._expire(
            keys=[keys.job, keys.events, keys.interactive, keys.bulk],
            args=[GROUP, keys.channel],
        )
        code: ExpireCode = reply.decode()
        return code

    async def purge(self, queue: str, partition: int, entry: str, job_id: str | None) -> bool:
        """Delete a dead letter.

        Args:
            queue: Name of the queue.
            partition: Partition of the dead letter.
            entry: Id of the dead letter in the partition's stream.
            job_id: Id of the job of the dead letter. None: the dead letter names no job.

        Returns:
            Whether the dead letter existed.
        """
        keys = [self._keys.dead(queue, partition)]
        if job_id is not None:
            of_job = self._keys.of_job(job_id)
            keys += [of_job.job, of_job.events]
        return bool(await self._purge_dead_letter(keys=keys, args=[entry]))
