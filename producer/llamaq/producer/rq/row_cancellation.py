"""Cancels the jobs that a killed bulk run has left in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Any

from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import JobId
from llamaq.producer import AsyncClient

ROWS_AT_ONCE = 1000
"""Number of rows that are looked up in one round trip."""
_OPEN = (JobState.QUEUED.value.encode(), JobState.RUNNING.value.encode())


async def cancel_rows_in_flight(client: AsyncClient, run_id: str, n_rows: int | None) -> int:
    """Cancel all open jobs of a run, which Redis finds by their idempotency keys, and return their number.

    Args:
        client: A client of the run's queue.
        run_id: The name of the run.
        n_rows: The number of rows of the run. None: it is not known, as no progress was stored so far. Then the search
            ends where Redis has no job of a thousand rows.

    Raises:
        RedisError: Redis is unreachable.
    """
    n_cancelled = 0
    rows = count(1) if n_rows is None else iter(range(1, n_rows + 1))
    while some := list(islice(rows, ROWS_AT_ONCE)):
        jobs = await _find_jobs(client, [f"{run_id}:{row}" for row in some])
        if n_rows is None and not jobs:
            break
        open_jobs = [job_id for job_id, is_open in jobs.items() if is_open]
        codes = await asyncio.gather(*(client.connection.scripts.cancel(job_id) for job_id in open_jobs))
        n_cancelled += sum(code not in ("gone", "done") for code in codes)
    return n_cancelled


async def _find_jobs(client: AsyncClient, idempotency_keys: Iterable[str]) -> dict[str, bool]:
    """Return the ids of the jobs with these idempotency keys, and for each whether it has not ended."""
    settings, keys = client.settings, client.keys
    by_partition: dict[int, list[str]] = {}
    for key in idempotency_keys:
        partition = JobId.new(settings.queue, settings.partitions, key).partition
        by_partition.setdefault(partition, []).append(keys.idempotency(settings.queue, partition, key))
    found: dict[str, bool] = {}
    for records in by_partition.values():  # one partition at a time: a cluster pipelines only the keys of one node
        ids = [job_id.decode() for job_id in await _pipelined(client, records, "get") if job_id is not None]
        states = await _pipelined(client, [keys.of_job(job_id).job for job_id in ids], "hget", "status")
        found |= {job_id: state in _OPEN for job_id, state in zip(ids, states, strict=True)}
    return found


async def _pipelined(client: AsyncClient, keys: Sequence[str], command: str, *arguments: str) -> list[Any]:
    if not keys:
        return []
    async with client.redis.pipeline(transaction=False) as pipe:
        for key in keys:
            getattr(pipe, command)(key, *arguments)
        replies: list[Any] = await pipe.execute()
        return replies
