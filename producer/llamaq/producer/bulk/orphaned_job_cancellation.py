"""Cancels the jobs that the killed process of a bulk run has left in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any

from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import JobId
from llamaq.producer.bulk.input_row import row_key
from llamaq.producer.client import AsyncClient
from llamaq.producer.job_window.window_job import replacement_key

ROWS_AT_ONCE = 1000
"""Number of rows that are looked up in one round trip."""
_OPEN = (JobState.QUEUED.value.encode(), JobState.RUNNING.value.encode())


async def cancel_rows_in_flight(client: AsyncClient, run_id: str, last_row: int, n_rows: int = 0) -> int:
    """Cancel all open jobs of a run, those of the newest rows first, and return their number. Redis finds the jobs by
    their idempotency keys.

    Args:
        client: A client of the run's queue.
        run_id: The name of the run.
        last_row: The highest known row number.
        n_rows: The number of rows. The search ends when Redis has no job for a thousand consecutive numbers after both.

    Raises:
        RedisError: Redis is unreachable.
    """
    n_cancelled = 0
    newest = last_row // ROWS_AT_ONCE + 1
    for part in chain(range(newest, -1, -1), count(newest + 1)):
        some = range(part * ROWS_AT_ONCE + 1, (part + 1) * ROWS_AT_ONCE + 1)
        jobs = await _find_jobs_of_rows(client, run_id, some)
        if not jobs and part > newest and some[-1] >= n_rows:
            break
        open_jobs = [job_id for job_id, is_open in jobs.values() if is_open]
        open_jobs += await _find_replacements(client, [key for key, (_, is_open) in jobs.items() if not is_open])
        codes = await asyncio.gather(*(client.connection.scripts.cancel(job_id) for job_id in open_jobs))
        n_cancelled += sum(code not in ("gone", "done") for code in codes)
    return n_cancelled


async def _find_jobs_of_rows(client: AsyncClient, run_id: str, rows: Sequence[int]) -> dict[str, tuple[str, bool]]:
    """Return all jobs of some rows. A row with several jobs has submitted them in their order."""
    found: dict[str, tuple[str, bool]] = {}
    for index in count():
        by_key = {row_key(run_id, row, index): row for row in rows}
        jobs = await _find_jobs(client, by_key)
        if not jobs:
            break
        found |= jobs
        rows = [by_key[key] for key in jobs]
    return found


async def _find_replacements(client: AsyncClient, ended: Sequence[str]) -> list[str]:
    """Return the ids of open jobs that were submitted in place of ended jobs, for example after a cancelled run."""
    found: list[str] = []
    for n_replaced in count(1):
        by_key = {replacement_key(key, n_replaced): key for key in ended}
        jobs = await _find_jobs(client, by_key)
        if not jobs:
            break
        found += [job_id for job_id, is_open in jobs.values() if is_open]
        ended = [by_key[key] for key, (_, is_open) in jobs.items() if not is_open]
    return found


async def _find_jobs(client: AsyncClient, idempotency_keys: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Return, for each of these idempotency keys, the id of its job, and whether the job has not ended."""
    queue, keys, n_partitions = client.queue, client.keys, await client.connection.n_partitions()
    by_partition: dict[int, list[str]] = {}
    for key in idempotency_keys:
        by_partition.setdefault(JobId.new(queue, n_partitions, key).partition, []).append(key)
    found: dict[str, tuple[str, bool]] = {}
    for partition, some in by_partition.items():  # one at a time: a cluster pipelines only the keys of one node
        records = [keys.idempotency(queue, partition, key) for key in some]
        replies = zip(some, await _pipelined(client, records, "get"), strict=True)
        ids = {key: job_id.decode() for key, job_id in replies if job_id is not None}
        states = await _pipelined(client, [keys.of_job(job_id).job for job_id in ids.values()], "hget", "status")
        found |= {key: (job_id, state in _OPEN) for (key, job_id), state in zip(ids.items(), states, strict=True)}
    return found


async def _pipelined(client: AsyncClient, keys: Sequence[str], command: str, *arguments: str) -> list[Any]:
    if not keys:
        return []
    async with client.redis.pipeline(transaction=False) as pipe:
        for key in keys:
            getattr(pipe, command)(key, *arguments)
        replies: list[Any] = await pipe.execute()
        return replies
