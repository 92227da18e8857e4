"""Cancels waiting jobs whose clients are gone, before these jobs take a slot."""

from __future__ import annotations

from collections.abc import Callable

from llamaq.worker.broker.partition_searches import search_partitions
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.broker.worker_queue import WorkerQueue

EVERY_S = 0.5
"""Time between two searches for jobs that are due for a check. All workers of a queue search."""
MAX_LATE_S = 2.0
"""If the check of a job is later than this, Redis or all workers were away, and the time without a subscriber begins
again."""
MAX_CHECKS = 100
"""Number of jobs that one call of the script checks at most. Redis executes nothing else meanwhile."""


class AbandonedJobs:
    """Checks the subscribers of waiting jobs with `cancel_on_disconnect`, in all partitions of a queue.

    Without this, each waiting job of a killed HTTP server would take a slot for `disconnect_s`: the worker of a job
    checks its subscribers only while the job has a slot.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self, queue: WorkerQueue, *, disconnect_s: float, may_have_jobs: Callable[[int], bool]) -> None:
        """Create the object.

        Args:
            queue: The queue.
            disconnect_s: Time without a subscriber after which a job is cancelled, in seconds.
            may_have_jobs: Returns whether a partition may have jobs. Others are not searched.
        """
        self._queue = queue
        self._scripts = UpkeepScripts(queue)
        self._disconnect_s = disconnect_s
        self._may_have_jobs = may_have_jobs

    async def run(self) -> None:
        """Check jobs until cancelled. A partition that does not answer delays no other partition."""
        await search_partitions(self._queue.partitions, self.check, every_s=EVERY_S, full=MAX_CHECKS)

    async def check(self, partition: int) -> int:
        """Check the jobs of one partition that are due. Returns their number, at most `MAX_CHECKS`.

        Raises:
            RedisError: Redis is unreachable, or refused a write.
        """
        if not self._may_have_jobs(partition):
            return 0
        return await self._scripts.end_abandoned(
            partition, disconnect_s=self._disconnect_s, max_late_s=MAX_LATE_S, count=MAX_CHECKS
        )

    def __repr__(self) -> str:
        return f"<AbandonedJobs of {self._queue!r}>"
