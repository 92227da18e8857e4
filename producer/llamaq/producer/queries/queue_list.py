"""Finds all queues on a Redis server, and counts their jobs and workers."""

from __future__ import annotations

from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.snapshots import QueueSummary
from llamaq.producer.queries.job_list import JobFilter, read_jobs_of
from llamaq.producer.queries.queue_snapshots import read_depth, read_workers
from llamaq.producer.queue_connection import QueueConnection

SCAN_COUNT = 1000
"""Number of keys that one call of SCAN examines."""
MAX_STREAMS = 10_000
"""Largest number of job streams that are looked at."""


async def read_queues(connection: QueueConnection) -> tuple[QueueSummary, ...]:
    """Return a summary of each queue, sorted by name. See `AsyncClient.queues`."""
    partitions = await find_queues(connection)
    return tuple([await _summary(connection, queue, partitions[queue]) for queue in sorted(partitions)])


async def find_queues(connection: QueueConnection) -> dict[str, int]:
    """Return the number of partitions of each queue that has a job stream. In a cluster, SCAN asks every node."""
    keys = connection.keys
    partitions: dict[str, int] = {}
    n_streams = 0
    async for stream in connection.redis.scan_iter(match=keys.job_streams(), count=SCAN_COUNT):
        found = keys.partition_of(stream.decode(errors="replace"))
        if found is not None:
            queue, partition = found
            partitions[queue] = max(partitions.get(queue, 0), partition + 1)
            n_streams += 1
        if n_streams >= MAX_STREAMS:
            break
    return partitions


async def _summary(connection: QueueConnection, queue: str, partitions: int) -> QueueSummary:
    depth = await read_depth(connection, queue, partitions)
    workers = await read_workers(connection.redis, connection.keys, queue)
    oldest = await read_jobs_of(connection, queue, partitions, JobFilter(state=JobState.QUEUED), limit=1)
    return QueueSummary(
        queue=queue,
        waiting=depth.waiting,
        running=depth.running,
        delayed=depth.delayed,
        mode=depth.mode,
        workers=len(workers),
        models=tuple(sorted({worker.card.model for worker in workers})),
        oldest_waiting_s=oldest[0].age_s if oldest and oldest[0].run_at_ms is None else None,
        partitions=partitions,
    )
