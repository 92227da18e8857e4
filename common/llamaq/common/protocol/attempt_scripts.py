"""The script calls that store the output of claimed jobs, and end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import GROUP, JobId, Keys
from llamaq.common.protocol.script_source import source
from llamaq.common.protocol.script_types import FinishReply, FlushReply, JobFlush, TerminalWrite

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_DEAD = 1000
"""Approximate number of dead letters that are stored in each partition."""
DEAD_TTL_S = 7 * 24 * 3600
"""A dead job is stored for at least this time, so that an operator can examine and retry it."""


def _finish_outcome(reply: Any) -> FinishReply | ResponseError:
    match reply:
        case [_, text]:
            return ResponseError(text.decode(errors="replace"))
        case int():
            return FinishReply("resend", reply)
        case _:
            return FinishReply("ok" if reply == b"ok" else "lost")


class AttemptScripts:
    """Calls the scripts for the output and the end of one worker's jobs.

    Each method raises `RedisError` if Redis cannot execute its script.
    """

    def __init__(self, redis: Redis, keys: Keys, worker: str) -> None:
        self._redis = redis
        self._keys = keys
        self.worker = worker
        """The id of the worker."""
        self._flush, self._finish = (redis.register_script(source(name)) for name in ("flush", "finish"))

    async def flush(self, flushes: Sequence[JobFlush], lease_ms: int, *, renew: bool) -> list[FlushReply]:
        """Store and publish the new tokens of jobs of one partition, and record which jobs have a slot.

        Args:
            flushes: What to write of each job.
            lease_ms: How long the worker keeps a job without a renewal, in milliseconds.
            renew: Whether to renew the leases of all jobs.

        Returns:
            One reply for each job, in the same order.
        """
        keys: list[str] = []
        values: list[int | str | bytes | Sequence[bytes]] = []
        for item in flushes:
            of_job = self._keys.of_job(item.job_id)
            keys += [of_job.job, of_job.events, item.stream]
            values += [item.attempt, item.entry_id, of_job.channel, item.offset, item.count, item.payload]
            values += [item.publish, item.has_started, item.has_slot, item.slot_ms, item.token_times, item.progress]
            values += [item.withheld, item.is_watched]
        args: list[str | int | bytes] = [GROUP, self.worker, lease_ms, int(renew), codec.encode_values(values)]
        reply = await self._flush(keys=keys, args=args)
        return [
            FlushReply(code.decode(), int(stored), int(listeners), refusal.decode())
            for code, stored, listeners, refusal in zip(*(reply[place::4] for place in range(4)), strict=True)
        ]

    async def finish_jobs(self, ends: Sequence[tuple[JobFlush, TerminalWrite]]) -> list[FinishReply | ResponseError]:
        """End jobs of one partition, at most `MAX_JOBS_IN_CALL`. This works also when Redis is full.

        Args:
            ends: For each job, the tokens since its last flush, which are published, and its terminal write.

        Returns:
            For each job, in the same order, whether it has ended, or which tokens must be sent again (`FinishReply`),
            or the error of Redis.
        """
        job_id = JobId.parse(ends[0][0].job_id)
        keys = [self._keys.dead(job_id.queue, job_id.partition)]
        values: list[Any] = []
        for last, terminal_write in ends:
            of_job = self._keys.of_job(last.job_id)
            keys += [of_job.job, of_job.events, last.stream]
            values += [last.attempt, last.entry_id, of_job.channel, last.job_id, last.payload, last.offset, last.count]
            values += [codec.encode_event(terminal_write.event), terminal_write.status, last.has_started]
            values += [terminal_write.dead_reason, [part for pair in terminal_write.fields.items() for part in pair]]
            values.append(last.progress)
        args: list[Any] = [self.worker, GROUP, DEAD_TTL_S * 1000, MAX_DEAD, codec.encode_values(values)]
        return [_finish_outcome(reply) for reply in await self._finish(keys=keys, args=args)]
