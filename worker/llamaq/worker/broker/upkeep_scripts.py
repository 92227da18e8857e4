"""The scripts for a whole partition: leaving it, releasing a dead worker, ending abandoned jobs, and sweeping."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, JobId
from llamaq.common.protocol.script_source import source
from llamaq.worker.broker.worker_queue import WorkerQueue

log = logging.getLogger(__name__)

MAX_WAITING_EXAMINED_FOR_DEAD_WORKER = 1000
"""Number of waiting entries of one stream that are searched for the jobs which a dead worker had claimed."""
SWEEP_PAUSE_S = 5.0
"""Time between two steps of the search for jobs that cannot be claimed."""
SWEEP_KEYS = 1000
"""Approximate number of keys that one step examines. Redis takes some milliseconds for them if all are of jobs."""
IDLE_CONSUMER_S = 10.0
"""A consumer without pending entries is removed after this time if its worker is not alive."""


class UpkeepScripts:
    """Calls the scripts that repair one partition of a queue.

    Each method raises `RedisError` if Redis cannot execute its script.
    """

    def __init__(self, queue: WorkerQueue) -> None:
        self._queue = queue
        self._leave_group, self._release_worker, self._abandoned, self._sweep = (
            queue.redis.register_script(source(name, __package__))
            for name in ("leave_group", "release_worker", "abandoned", "sweep")
        )

    def _streams(self, partition: int) -> list[str]:
        return [self._queue.job_stream(partition, priority) for priority in Priority]

    async def leave_group(self, partition: int, worker: str) -> int:
        """Remove a worker from the consumer groups. Its pending entries are requeued; return their number."""
        return int(await self._leave_group(keys=self._streams(partition), args=[GROUP, worker]))

    async def release_worker(self, partition: int, worker: str) -> int:
        """Release all jobs of a worker that is dead, and return their number.

        The jobs are requeued, and the crash counts against each of them. A job whose cancel was accepted ends instead.
        """
        args: list[str | int] = [GROUP, worker, MAX_WAITING_EXAMINED_FOR_DEAD_WORKER]
        return int(await self._release_worker(keys=self._streams(partition), args=args))

    async def end_abandoned(self, partition: int, *, disconnect_s: float, max_late_s: float, count: int) -> int:
        """Cancel waiting jobs with `cancel_on_disconnect` that have had no subscriber for `disconnect_s` seconds.

        Args:
            partition: The partition.
            disconnect_s: The time in seconds.
            max_late_s: If the check of a job is later than this, the time begins again.
            count: Number of jobs to check at most.

        Returns:
            The number of jobs that were due for a check, at most `count`.
        """
        reply = await self._abandoned(
            keys=[self._queue.keys.watched(self._queue.name, partition), *self._streams(partition)],
            args=[GROUP, int(disconnect_s * 1000), int(max_late_s * 1000), count],
        )
        return int(reply)

    async def sweep(
        self, partition: int, live_workers: Iterable[str], *, pause_s: float = SWEEP_PAUSE_S, n_keys: int = SWEEP_KEYS
    ) -> list[str]:
        """Do one step of the search for jobs that cannot be claimed, and remove consumers of dead workers.

        Events and idempotency records of jobs that do not exist are deleted.

        The call does nothing if a worker has done a step within the last `pause_s` seconds. A hash that another client
        of Redis wrote, and whose name is no job id, is repaired at most once.

        Returns:
            The ids of the jobs that can be claimed again.
        """
        queue = self._queue
        reply: Any = await self._sweep(
            keys=[queue.keys.sweep(queue.name, partition), *self._streams(partition)],
            args=[GROUP, int(pause_s * 1000), n_keys, int(IDLE_CONSUMER_S * 1000), *live_workers],
        )
        repaired = []
        for stored in reply:
            job_id = JobId.find(stored, queue.name, partition)
            if job_id is not None:
                repaired.append(str(job_id))
                continue
            # Its entry becomes a dead letter. Without this field, the hash gets no further entries.
            log.warning("job.cannot_repair id=%.200r: another client of Redis has written this hash", stored)
            await queue.redis.hdel(queue.keys.unusable_job(queue.name, partition, stored), "status")
        return repaired
