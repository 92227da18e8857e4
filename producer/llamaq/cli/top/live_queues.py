"""Reads the queues of the view through a client, and runs the actions of its user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamaq.cli.top.reading_types import QueueReading, Reading
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.protocol.queue_config import QueueConfig, QueueMode
from llamaq.common.protocol.queue_mode import set_queue_mode
from llamaq.common.redis.server_state import read_server_memory, server_time_ms
from llamaq.producer import AsyncClient
from llamaq.producer.queries import dead_letters
from llamaq.producer.queries.damaged_queues import DamagedQueues
from llamaq.producer.queries.job_list import JobFilter, read_jobs_of
from llamaq.producer.queries.queue_list import find_queues
from llamaq.producer.queries.queue_snapshots import RECENT_JOBS, oldest_waiting_s, read_depth, read_recent, read_workers

MAX_QUEUES = 100
"""Largest number of queues that are read at once. `--queue` selects others."""
MAX_LISTED = 100
"""Largest number of waiting jobs and of dead letters that are read from each queue."""
SCAN_EVERY_S = 30.0
"""Seconds between two searches of all keys for queues that no worker serves, and for the partitions of named queues."""


@dataclass(slots=True)
class _Queue:
    """The data of a queue that are kept between two readings."""

    partitions: int
    recent: list[RecentJob] = field(default_factory=list)
    """The jobs that ended last, newest first."""


class LiveQueues:
    """All queues of a Redis server, or some. One reading costs a fixed number of commands for each queue and worker.

    Args:
        client: The client. Its queue does not matter.
        queues: The names of the queues. Empty: all queues.
    """

    def __init__(self, client: AsyncClient, queues: Sequence[str] = ()) -> None:
        self._client = client
        self._named = tuple(queues)
        self._queues: dict[str, _Queue] = {}
        self._scanned_s: float | None = None
        self._damaged = DamagedQueues()

    async def read(self, *, with_waiting: bool = False, with_dead: bool = False) -> Reading:
        """Read the named queues, or if none are named, all queues that have a job or a worker.

        Args:
            with_waiting: Whether to read the oldest waiting jobs.
            with_dead: Whether to read the newest dead letters.

        Raises:
            RedisError: Redis did not answer.
        """
        await self._find_queues()
        shown = sorted(self._queues)[:MAX_QUEUES]
        read = (
            self._damaged.read(name, self._read_queue(name, with_waiting=with_waiting, with_dead=with_dead))
            for name in shown
        )
        readings = [one for one in await asyncio.gather(*read) if one and (self._named or _is_in_use(one))]
        redis = self._client.redis
        now_ms, servers = await asyncio.gather(server_time_ms(redis), read_server_memory(redis))
        return Reading(
            now_ms,
            tuple(readings),
            n_hidden_queues=len(self._queues) - len(shown),
            damaged_queues=self._damaged.names,
            redis_fullness=max((server.fullness for server in servers), default=0.0),
        )

    async def _find_queues(self) -> None:
        """Find new queues. Queues that workers serve are searched in each reading, other queues only from time to
        time.
        """
        client = self._client
        is_due = self._scanned_s is None or time.monotonic() - self._scanned_s >= SCAN_EVERY_S
        if is_due:
            named = dict.fromkeys(self._named, client.settings.partitions)
            found = named or await find_queues(client.connection)
            self._scanned_s = time.monotonic()
        elif self._named:
            return
        else:
            served: Any = await client.redis.zrange(client.keys.queues(), 0, -1)
            names = [name.decode(errors="replace") for name in served]
            found = {name: client.settings.partitions for name in names if name not in self._queues}
        for name, partitions in found.items():
            config = None
            if self._named or name not in self._queues:
                config = await self._damaged.read(name, QueueConfig.read(client.redis, client.keys, name, 0))
            known = self._queues.setdefault(name, _Queue(partitions))
            known.partitions = max(known.partitions, partitions if config is None else config.partitions)

    async def _read_queue(self, name: str, *, with_waiting: bool, with_dead: bool) -> QueueReading:
        client, queue = self._client, self._queues[name]
        depth = await read_depth(client.connection, name, queue.partitions)
        workers, n_dead, oldest_s, _ = await asyncio.gather(
            read_workers(client.connection, name),
            dead_letters.count_all(client.connection, name, queue.partitions),
            oldest_waiting_s(client.connection, name, queue.partitions),
            self._read_recent(name, queue),
        )
        wanted = JobFilter(state=JobState.QUEUED)
        return QueueReading(
            queue=name,
            depth=depth,
            workers=workers,
            recent=tuple(queue.recent),
            oldest_waiting_s=oldest_s,
            n_dead=n_dead,
            waiting=await read_jobs_of(client.connection, name, queue.partitions, wanted, MAX_LISTED)
            if with_waiting
            else (),
            dead=await dead_letters.read_all(client.connection, name, queue.partitions, MAX_LISTED)
            if with_dead
            else (),
        )

    async def _read_recent(self, name: str, queue: _Queue) -> None:
        """Read the jobs that have ended since the last reading."""
        since_ms = queue.recent[0].ended_ms if queue.recent else 0
        new = await read_recent(self._client.connection, name, since_ms)
        known = {job.job_id for job in queue.recent if job.ended_ms == since_ms}
        queue.recent = [*(job for job in new if job.job_id not in known), *queue.recent][:RECENT_JOBS]

    async def pause(self, queue: str) -> None:
        """Pause a queue: no job gets its first slot until it is resumed."""
        await self._set_mode(queue, QueueMode.PAUSED)

    async def resume(self, queue: str) -> None:
        """Let a paused or draining queue accept and run jobs again."""
        await self._set_mode(queue, QueueMode.OPEN)

    async def _set_mode(self, queue: str, mode: QueueMode) -> None:
        client = self._client
        await set_queue_mode(client.redis, client.keys, queue, self._queues[queue].partitions, mode)

    async def cancel(self, job_id: str) -> bool:
        """Cancel a job. Returns False if it has ended before."""
        return await self._client.cancel(job_id)

    async def retry(self, letter_id: str) -> str:
        """Submit the job of a dead letter again, remove the letter, and return the id of the new job."""
        return (await self._client.retry_dead_letter(letter_id)).id


def _is_in_use(queue: QueueReading) -> bool:
    depth = queue.depth
    return bool(depth.waiting or depth.running or depth.delayed or queue.workers or queue.n_dead)
