"""Calls that watch and control the whole queue, its jobs and its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from pydantic import JsonValue

from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_status import JobSummary
from llamaq.common.protocol.queue_and_worker_state import QueueDepth, QueueStats, QueueSummary, Worker
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.queue_mode import set_queue_mode
from llamaq.producer.calls.calls_base import ClientCalls
from llamaq.producer.queries import job_list, queue_list, queue_snapshots


class QueueCalls(ClientCalls):
    """Calls that watch and control the whole queue, its jobs and its workers."""

    async def queue_depth(self) -> QueueDepth:
        """Return the numbers of waiting and running jobs in the queue. Jobs that have reached a deadline end first."""
        return await queue_snapshots.read_depth(self.connection, self.queue, await self.connection.n_partitions())

    async def pause(self) -> None:
        """Pause the queue: no job gets its first slot until `resume`.

        Jobs that have a slot, or had one, continue, perhaps on another worker. New jobs are still accepted, and their
        deadlines count. `queue_depth().mode` is the mode of the queue.
        """
        await self._set_mode(QueueMode.PAUSED)

    async def drain(self) -> None:
        """Drain the queue: until `resume`, `submit` raises `QueueDraining`, and workers run the jobs in the queue.

        A queue cannot be paused and draining at the same time: `drain` starts the waiting jobs of a paused queue.
        """
        await self._set_mode(QueueMode.DRAINING)

    async def resume(self) -> None:
        """End `pause` and `drain`. Workers claim the waiting jobs within half a second."""
        await self._set_mode(QueueMode.OPEN)

    async def _set_mode(self, mode: QueueMode) -> None:
        await set_queue_mode(self.redis, self.keys, self.queue, self.settings.partitions, mode)

    async def queues(self) -> tuple[QueueSummary, ...]:
        """Return all queues with this client's `key_prefix`, sorted by name, including those that no worker serves.

        A queue exists from its first job or worker on. The call examines all keys of the Redis server, and finds at
        most 10,000 partitions.
        """
        return await queue_list.read_queues(self.connection)

    async def jobs(
        self,
        *,
        state: JobState | Literal["queued", "running"] | None = None,
        priority: Priority | Literal["interactive", "bulk"] | None = None,
        older_than_s: float | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        tenant: str | None = None,
        limit: int = 100,
    ) -> tuple[JobSummary, ...]:
        """Return the waiting and running jobs of the queue, oldest first. Jobs that have reached a deadline end first.

        Args:
            state: `QUEUED` or `RUNNING`. None: both.
            priority: Only jobs of this priority. None: all.
            older_than_s: Only jobs that were submitted more than this many seconds ago. None: all.
            metadata: Only jobs whose metadata has these keys and values. A text also matches a number or boolean with
                this JSON text.
            tenant: Only jobs of this tenant. None: all.
            limit: Largest number of jobs.

        Raises:
            InvalidRequest: `state` is `FINISHED` or `FAILED`. Such jobs are not in the queue any more.
        """
        wanted = job_list.build_filter(state, priority, older_than_s, metadata, tenant)
        return await job_list.read_jobs(self.connection, wanted, limit)

    async def purge(
        self,
        *,
        priority: Priority | Literal["interactive", "bulk"] | None = None,
        older_than_s: float | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        tenant: str | None = None,
        dry_run: bool = False,
    ) -> tuple[str, ...]:
        """Cancel the waiting jobs of the queue that match all arguments. Without arguments, cancel all waiting jobs.

        Each job finishes with the reason `cancelled`, which its readers receive. Running jobs continue.

        Args:
            priority: Only jobs of this priority. None: all.
            older_than_s: Only jobs that were submitted more than this many seconds ago. None: all.
            metadata: Only jobs whose metadata has these keys and values. A text also matches a number or boolean with
                this JSON text.
            tenant: Only jobs of this tenant. None: all.
            dry_run: If true, cancel nothing, and return the matching jobs.

        Returns:
            The ids of the cancelled jobs. With `dry_run`, the ids of the matching jobs.
        """
        wanted = job_list.build_filter(JobState.QUEUED, priority, older_than_s, metadata, tenant)
        return await job_list.purge(self.connection, wanted, dry_run=dry_run)

    async def workers(self) -> tuple[Worker, ...]:
        """Return the card and the last heartbeat of each live worker of the queue, sorted by worker id."""
        return await queue_snapshots.read_workers(self.connection, self.queue)

    async def stats(self) -> QueueStats:
        """Return the queue's depth, its live workers, and up to 100 jobs that ended last, newest first."""
        depth, workers, recent = await asyncio.gather(
            self.queue_depth(), self.workers(), queue_snapshots.read_recent(self.connection, self.queue)
        )
        return QueueStats(queue=self.queue, depth=depth, workers=workers, recent=recent)
