"""The close of an asynchronous client ends the calls of other tasks and cancels their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from llamaq.producer import AsyncClient

SOON_S = 10.0


async def read_all(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass


async def ends_of(redis_url: str, queue: str, job_ids: list[str]) -> list[str | None]:
    """Return the finish reason of each job; None: it has not ended."""
    async with AsyncClient(redis_url, queue) as observer:
        return [(await observer.job(job_id).status()).finish_reason for job_id in job_ids]


async def wait_for_jobs(client: AsyncClient, n_jobs: int) -> None:
    """Wait until `n_jobs` jobs are in the queue."""
    while (await client.queue_depth()).waiting < n_jobs:  # noqa: ASYNC110  # the jobs are in Redis
        await asyncio.sleep(0.01)


async def test_calls_of_other_tasks_end_and_their_jobs_are_cancelled(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        kept, stream = await client.submit("kept"), await client.stream("a stream")
        reading = asyncio.create_task(read_all(stream))
        calls = [client.generate("a call"), kept.result(), read_all(kept.stream())]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await wait_for_jobs(client, 3)
        (called,) = {job.job_id for job in await client.jobs()} - {kept.id, stream.job.id}
    async with asyncio.timeout(SOON_S):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait([reading])  # it gets the end of its job, or the error
    assert [repr(outcome) for outcome in outcomes] == ["RuntimeError('this client was closed during the call')"] * 3
    assert reading.exception() is None or repr(reading.exception()) == repr(outcomes[0])
    assert await ends_of(redis_url, queue, [called, stream.job.id, kept.id]) == ["cancelled", "cancelled", None]


async def test_a_call_that_submits_while_the_client_closes_leaves_no_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.queue_depth()  # connects
        task = asyncio.create_task(client.generate("a call"))
        await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(RuntimeError, match="closed"):
            await task
    async with AsyncClient(redis_url, queue) as observer:
        assert (await observer.queue_depth()).waiting == 0


async def test_a_failure_beside_a_call_cancels_the_job_of_this_call(redis_url: str, queue: str) -> None:
    async def fail() -> None:
        await wait_for_jobs(client, 1)
        raise KeyError

    with pytest.raises(KeyError):
        async with AsyncClient(redis_url, queue) as client:
            await asyncio.gather(client.generate("a call"), fail())
    async with AsyncClient(redis_url, queue) as observer:
        assert (await observer.queue_depth()).waiting == 0


async def test_a_closed_client_can_be_used_again(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)
    for _ in range(2):
        async with client:
            job = await client.submit("x")
            waiting = asyncio.create_task(job.result())
            await asyncio.sleep(0)
            await job.cancel()
            assert (await waiting).job_id == job.id
