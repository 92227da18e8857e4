"""Writes the tokens of running jobs to Redis, and acts on the replies: jobs are cancelled, or their lease is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from redis.exceptions import ResponseError

from llamaq.common.protocol.script_types import FlushReply, JobFlush
from llamaq.worker.broker.concurrent_calls import run_all
from llamaq.worker.broker.engine_controls import EngineControls
from llamaq.worker.broker.job_departures import JobDepartures
from llamaq.worker.broker.job_progress import JobProgress
from llamaq.worker.broker.outbox_settings import OutboxSettings
from llamaq.worker.broker.worker_scripts import WorkerScripts

log = logging.getLogger(__name__)


class JobFlushes:
    """Flushes jobs that have not ended. One call of `flush.lua` has the jobs of one partition."""

    def __init__(
        self,
        scripts: WorkerScripts,
        engine: EngineControls,
        departures: JobDepartures,
        settings: OutboxSettings,
        on_missing_tokens: Callable[[], None],
    ) -> None:
        """Create the object.

        Args:
            scripts: The scripts that write to Redis.
            engine: The engine thread's controls.
            departures: Drops the jobs whose lease is lost.
            settings: How long a lease lasts, and how long a job may be without a subscriber.
            on_missing_tokens: Called when Redis has lost tokens, which the next flush writes again.
        """
        self._scripts = scripts
        self._engine = engine
        self._departures = departures
        self._settings = settings
        self._on_missing_tokens = on_missing_tokens

    async def write(
        self, jobs: Sequence[tuple[JobProgress, JobFlush]], now_s: float, *, renew: bool, outage_ended_s: float | None
    ) -> None:
        """Write the tokens of running jobs that are due and that Redis has not stored yet.

        Args:
            jobs: The jobs, all of one partition, and what is written for each of them.
            now_s: The time.
            renew: Whether the leases are renewed.
            outage_ended_s: When the last outage of the partition ended. From this time on, subscribers have
                `disconnect_s` to reconnect. None: the outage has not ended.

        Raises:
            RedisError: Redis is unreachable, or refused a write. The replies for the other jobs were handled.
        """
        flushes = [flush for _, flush in jobs]
        replies = await self._scripts.flush(flushes, self._settings.lease_ms, renew=renew)
        lost = []
        for (job, sent), reply in zip(jobs, replies, strict=True):
            if reply.code == "lost":
                lost.append(job)
                continue
            job.drop_progress(sent)
            self._cancel_if_asked(job, reply, now_s, outage_ended_s)
            if not reply.refusal:
                self._record(job, sent, reply.stored, now_s)
        await run_all(map(self._departures.drop_lost, lost))
        if refusal := next((reply.refusal for reply in replies if reply.refusal), ""):
            raise ResponseError(refusal)

    def _cancel_if_asked(self, job: JobProgress, reply: FlushReply, now_s: float, outage_ended_s: float | None) -> None:
        """Cancel a job if a client asks for it, or if its subscribers have left and the request asks for this."""
        if reply.listeners:
            job.subscriber_seen_s = now_s
        is_abandoned = (
            job.cancel_on_disconnect
            and outage_ended_s is not None
            and now_s - max(job.subscriber_seen_s, outage_ended_s) > self._settings.disconnect_s
        )
        if (reply.code == "cancel" or is_abandoned) and job.ask_cancel():
            self._engine.cancel(job.lease.job_id)

    def _record(self, job: JobProgress, sent: JobFlush, n_stored: int, now_s: float) -> None:
        """Record what Redis has stored of a job. Tokens that a failover lost are written by the next flush."""
        if not job.record_flush(sent, n_stored, now_s):
            log.warning("job.tokens_resent id=%s offset=%d stored=%d", sent.job_id, sent.offset, n_stored)
            self._on_missing_tokens()

    def __repr__(self) -> str:
        return f"<JobFlushes of worker {self._scripts.worker}>"
