"""Cancels the jobs that a killed bulk run has left in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import JobId
from llamaq.producer import AsyncClient

ROWS_AT_ONCE = 1000
"""Number of rows that are looked up in one round trip."""
_OPEN = (JobState.QUEUED.value.encode(), JobState.RUNNING.value.encode())


async def cancel_rows_in_flight(client: AsyncClient, run_id: str, n_rows: int) -> int:
    """Cancel all open jobs of a run, which Redis finds by their idempotency keys, and return their number.

    Args:
        client: A client of the run's queue.
        run_id: The name of the run.
        n_rows: The number of rows of the run.

    Raises:
        RedisError: Redis is unreachable.
    """
    n_cancelled = 0
    rows = iter(range(1, n_rows + 1))
    while some := list(islice(rows, ROWS_AT_ONCE)):
        open_jobs = await _open_jobs(client, [f"{run_id}:{row}" for row in some])
        codes = await asyncio.gather(*(client.connection.scripts.cancel(job_id) for job_id in open_jobs))
        n_cancelled += sum(code not in ("gone", "done") for code in codes)
    return n_cancelled


async def _open_jobs(client: AsyncClient, idempotency_keys: Iterable[str]) -> list[str]:
    """Return the ids of the jobs with these idempotency keys that have not ended."""
    settings, keys = client.settings, client.keys
    by_partition: dict[int, list[str]] = {}
    for key in idempotency_keys:
        partition = JobId.new(settings.queue, settings.partitions, key).partition
        by_partition.setdefault(partition, []).append(keys.idempotency(settings.queue, partition, key))
    found: list[str] = []
    for records in by_partition.values():  # one partition at a time: a cluster pipelines only the keys of one node
        ids = [job_id.decode() for job_id in await _pipelined(client, records, "get") if job_id is not None]
        states = await _pipelined(client, [keys.of_job(job_id).job for job_id in ids], "hget", "status")
        found += [job_id for job_id, state in zip(ids, states, strict=True) if state in _OPEN]
    return found


async def _pipelined(client: AsyncClient, keys: Sequence[str], command: str, *arguments: str) -> list[Any]:
    if not keys:
        return []
    async with client.redis.pipeline(transaction=False) as pipe:
        for key in keys:
            getattr(pipe, command)(key, *arguments)
        replies: list[Any] = await pipe.execute()
        return replies
