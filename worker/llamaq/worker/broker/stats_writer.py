"""Stores the stats of ended jobs in the stream of stats of their queue."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from itertools import islice

from redis.exceptions import RedisError

from llamaq.common.backoff import Backoff
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL
from llamaq.common.redis.outage_log import OutageLog
from llamaq.worker.broker.worker_scripts import MAX_STATS, WorkerScripts
from llamaq.worker.engine_loop.telemetry import EndedJob, Telemetry

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class StatsWriter:
    """Records ended jobs in the telemetry, and stores their stats in the background.

    The stream of stats may be on another node of a cluster than a job. If that node does not answer, the partition of
    the job is not delayed.

    Threads: all methods run on the I/O thread.

    Args:
        scripts: The scripts that write to Redis.
        queue: The queue of the jobs.
        telemetry: Counts the jobs.
    """

    def __init__(self, scripts: WorkerScripts, queue: str, telemetry: Telemetry) -> None:
        self._scripts = scripts
        self._queue = queue
        self._telemetry = telemetry
        self._unstored: deque[RecentJob] = deque(maxlen=MAX_STATS)
        self._has_unstored = asyncio.Event()

    def record_job(self, ended: EndedJob) -> None:
        """Record the end of a job in the telemetry, and soon in the queue's stream of stats."""
        self._telemetry.record_job(ended)
        self._unstored.append(
            RecentJob(
                job_id=ended.job_id,
                finish_reason=ended.finish_reason,
                error_code=ended.error_code,
                stats=ended.stats,
            )
        )
        self._has_unstored.set()

    async def run(self) -> None:
        """Store the stats of ended jobs until cancelled."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        outage = OutageLog(log, "stats")
        while True:
            await self._has_unstored.wait()
            try:
                await self.store()
            except RedisError as exc:
                outage.record_failure(exc)
                await asyncio.sleep(backoff.next_delay_s())
            else:
                outage.record_success()
                backoff.reset()

    async def store(self) -> None:
        """Store all stats that are not stored yet.

        Raises:
            RedisError: Redis is unreachable, or refused the write. The stats that it did not store are kept.
        """
        while batch := list(islice(self._unstored, MAX_JOBS_IN_CALL)):
            await self._scripts.add_stats(self._queue, batch)
            self._forget(batch)
        self._has_unstored.clear()

    def _forget(self, stored: Sequence[RecentJob]) -> None:
        """Forget the oldest stats, which are stored. Newer ones may have pushed some of them out meanwhile."""
        for one in stored:
            if self._unstored and self._unstored[0] is one:
                self._unstored.popleft()

    def __repr__(self) -> str:
        return f"<StatsWriter {self._queue!r} unstored={len(self._unstored)}>"
