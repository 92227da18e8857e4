"""A worker full of interactive jobs claims the bulk jobs of their share, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from tests.worker.broker.test_suspects import until, working

from llamaq.common.protocol.job_request import Priority
from llamaq.producer import AsyncClient
from llamaq.worker.broker import intake
from llamaq.worker.broker.job_claims import ClaimReply, JobClaims

CAPACITY = 3


async def test_a_worker_full_of_interactive_jobs_claims_one_bulk_job_at_a_time(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        interactive = [await client.submit("interactive") for _ in range(2 * CAPACITY)]
        bulk = [await client.submit("bulk", priority="bulk") for _ in range(3)]
        bulk_ids = [job.id for job in bulk]
        async with working(redis_url, queue, capacity=CAPACITY) as worker:
            await until(lambda: len(worker.admitted) == CAPACITY + 1)
            assert sorted(worker.admitted) == sorted([*(job.id for job in interactive[:CAPACITY]), bulk_ids[0]])
            for job in bulk:
                await until(partial(worker.admitted.__contains__, job.id))
                assert sum(job_id in bulk_ids for job_id in worker.admitted) == 1
                worker.end(job)
            for job in interactive:
                await until(partial(worker.admitted.__contains__, job.id))
                worker.end(job)
            for job in (*bulk, *interactive):
                await job.result()


async def test_a_worker_full_of_bulk_jobs_waits_for_interactive_jobs_without_polling(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Sequence[Priority]] = []
    read = JobClaims.read

    async def counted_read(
        claims: JobClaims, count: int, priorities: Sequence[Priority] = tuple(Priority)
    ) -> list[ClaimReply]:
        reads.append(priorities)
        return await read(claims, count, priorities)

    is_waiting = asyncio.Event()
    wait = JobClaims.wait

    async def noted_wait(claims: JobClaims, longest_s: float, priorities: Sequence[Priority] = tuple(Priority)) -> None:
        if list(priorities) == [Priority.INTERACTIVE]:
            is_waiting.set()
        await wait(claims, longest_s, priorities)

    monkeypatch.setattr(JobClaims, "read", counted_read)
    monkeypatch.setattr(JobClaims, "wait", noted_wait)
    monkeypatch.setattr(intake, "SEARCH_EVERY_S", 60.0)
    monkeypatch.setattr(intake, "LONGEST_WAIT_S", 60.0)
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=CAPACITY) as worker:
        bulk = [await client.submit("bulk", priority="bulk") for _ in range(CAPACITY + 1)]
        await until(lambda: len(worker.admitted) == CAPACITY)
        await is_waiting.wait()
        n_reads = len(reads)
        await asyncio.sleep(0.5)  # polls would add up in this time
        assert len(reads) == n_reads
        job = await client.submit("interactive")
        await until(lambda: job.id in worker.admitted)
        worker.end(job)
        worker.end(bulk[0])  # a slot becomes free: the worker does not wait for an interactive job any longer
        await until(lambda: bulk[-1].id in worker.admitted)
