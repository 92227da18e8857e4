"""Ends the jobs of a queue that have reached a deadline, in every state and in any worker.

Jobs that were submitted for a later time also get their entries here when they are due.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from llamaq.common.protocol.end_expired_jobs import MAX_DUE, end_expired
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.script_types import DueJobs
from llamaq.worker.broker.partition_searches import search_partitions
from llamaq.worker.broker.worker_queue import WorkerQueue

EVERY_S = 0.25
"""Time between two searches. All workers of a queue search, so no search depends on a single worker."""


class DeadlineSweep:
    """Searches each partition of a queue for due jobs: ends those at a deadline, and adds the entries of delayed jobs.

    A worker ends the jobs in its own slots at their `deadline_s`. The sweep ends jobs that wait, and jobs whose worker
    does not answer.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self, queue: WorkerQueue, *, on_reply: Callable[[int, DueJobs, float], None]) -> None:
        """Create the sweep.

        Args:
            queue: The queue to search.
            on_reply: Called at each search, with a partition, the reply, and how long this worker has waited for the
                reply, in seconds.
        """
        self._queue = queue
        self._scripts = JobScripts(queue.redis, queue.keys)
        self._on_reply = on_reply
        self._asking_since_s: dict[int, float] = {}
        """Maps each partition that has not answered yet to the time of the first unanswered question."""

    async def run(self) -> None:
        """Search until cancelled. A partition that does not answer delays no other partition."""
        await search_partitions(self._queue.partitions, self.handle_due, every_s=EVERY_S, full=MAX_DUE)

    async def handle_due(self, partition: int) -> int:
        """End the expired jobs of one partition, and give due jobs their entries. Returns the larger of both numbers of
        jobs.

        Raises:
            RedisError: Redis is unreachable, or refused a write.
        """
        queue, scripts = self._queue, self._scripts
        asking_since_s = self._asking_since_s.setdefault(partition, time.monotonic())
        due = await scripts.due_jobs(queue.name, partition, MAX_DUE)
        del self._asking_since_s[partition]
        self._on_reply(partition, due, time.monotonic() - asking_since_s)
        await end_expired(queue.redis, scripts, queue.keys, queue.name, partition, due.expired)
        return max(len(due.expired), due.n_given)

    def __repr__(self) -> str:
        return f"<DeadlineSweep of {self._queue!r}>"
