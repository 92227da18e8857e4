"""Finds all queues on a Redis server, and counts their jobs and workers."""

from __future__ import annotations

from llamaq.common.protocol.queue_and_worker_state import QueueSummary
from llamaq.producer.queries.damaged_queues import DamagedQueues
from llamaq.producer.queries.queue_snapshots import oldest_waiting_s, read_depth, read_workers
from llamaq.producer.queue_connection import QueueConnection

SCAN_COUNT = 1000
"""Number of keys that one call of SCAN examines."""
MAX_STREAMS = 10_000
"""Largest number of job streams that are looked at."""


async def read_queues(connection: QueueConnection) -> tuple[QueueSummary, ...]:
    """Return a summary of each queue, sorted by name. See `AsyncClient.queues`."""
    partitions, damaged = await find_queues(connection), DamagedQueues()
    summaries = [
        await damaged.read(queue, summarize(connection, queue, partitions[queue])) for queue in sorted(partitions)
    ]
    return tuple(summary for summary in summaries if summary is not None)


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


async def summarize(connection: QueueConnection, queue: str, partitions: int) -> QueueSummary:
    """Return a summary of one queue."""
    depth = await read_depth(connection, queue, partitions)
    workers = await read_workers(connection, queue)
    return QueueSummary(
        queue=queue,
        waiting=depth.waiting,
        running=depth.running,
        delayed=depth.delayed,
        mode=depth.mode,
        workers=len(workers),
        models=tuple(sorted({worker.card.model for worker in workers})),
        oldest_waiting_s=await oldest_waiting_s(connection, queue, partitions),
        partitions=partitions,
        tenants=len(depth.tenants),
    )
