"""A worker whose slots are always busy still takes the jobs that other workers requeued, before new jobs."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.worker.broker.test_suspects import until, working

from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.intake import BLOCK_S

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
            assert await leaving.scripts.requeue(claim, None, leaving.name)
            new = await client.submit("new")
            await asyncio.sleep(1.5 * BLOCK_S)  # the worker has looked for such jobs, and had no room
            worker.end(job)
            await until(lambda: len(worker.admitted) == CAPACITY)
            assert requeued.id in worker.admitted
            worker.end(requeued)
            await until(partial(worker.admitted.__contains__, new.id))
            worker.end(new)
            await client.submit("running")
            await until(lambda: len(worker.admitted) == CAPACITY)
