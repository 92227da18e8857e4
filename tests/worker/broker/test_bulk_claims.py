"""A worker full of interactive jobs claims the bulk jobs of their share, on a real Redis."""

from __future__ import annotations

from functools import partial

from tests.worker.broker.test_suspects import until, working

from llamaq.producer import AsyncClient

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
