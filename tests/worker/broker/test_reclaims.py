"""A worker whose slots are always busy still takes the jobs that other workers requeued, before new jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_suspects import until, working

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.script_types import JobEntry
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker import intake
from llamaq.worker.broker.intake import SEARCH_EVERY_S
from llamaq.worker.broker.job_claims import JobClaims

CAPACITY = 3


async def test_the_next_free_slot_is_for_a_requeued_job_although_new_jobs_wait(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue, name="leaving") as leaving,
        working(redis_url, queue, capacity=CAPACITY) as worker,
    ):
        running = [await client.submit("running") for _ in range(CAPACITY)]
        await until(lambda: len(worker.admitted) == CAPACITY)
        for job in list(running):
            requeued = await client.submit("requeued")
            claim = await leaving.claim()
            assert claim is not None
            assert await worker_scripts(leaving).requeue(claim, None)
            new = await client.submit("new")
            await asyncio.sleep(1.5 * SEARCH_EVERY_S)  # the worker has looked for such jobs, and had no room
            worker.end(job)
            await until(lambda: len(worker.admitted) == CAPACITY)
            assert requeued.id in worker.admitted
            worker.end(requeued)
            await until(partial(worker.admitted.__contains__, new.id))
            worker.end(new)
            await client.submit("running")
            await until(lambda: len(worker.admitted) == CAPACITY)


async def test_a_slot_that_becomes_free_during_a_search_is_for_a_requeued_job(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_searching, may_reply = asyncio.Event(), asyncio.Event()
    may_reply.set()
    reclaim = JobClaims.reclaim

    async def reclaim_late(claims: JobClaims, count: int, priorities: Sequence[Priority]) -> list[JobEntry]:
        found = await reclaim(claims, count, priorities)
        if not may_reply.is_set():
            is_searching.set()
            await may_reply.wait()
        return found

    monkeypatch.setattr(intake, "SEARCH_EVERY_S", 0.05)
    monkeypatch.setattr(JobClaims, "reclaim", reclaim_late)
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue, name="leaving") as leaving,
        working(redis_url, queue, capacity=1) as worker,
    ):
        running = await client.submit("running")
        await until(lambda: running.id in worker.admitted)
        requeued = await client.submit("requeued")
        claim = await leaving.claim()
        assert claim is not None
        assert await worker_scripts(leaving).requeue(claim, None)
        await client.submit("new")
        await asyncio.sleep(0.1)  # the next search for interactive jobs is due
        may_reply.clear()
        await is_searching.wait()  # for bulk jobs
        worker.end(running)
        await until(lambda: worker.outbox.n_jobs == 0)
        may_reply.set()
        await until(lambda: worker.admitted)
        assert list(worker.admitted) == [requeued.id]
