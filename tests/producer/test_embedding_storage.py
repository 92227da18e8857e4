"""How long Redis stores embeddings."""

from __future__ import annotations

import asyncio

from llamaq.common.protocol.keys import Keys
from llamaq.producer import AsyncClient


async def test_only_a_call_that_waits_for_embeddings_shortens_the_time_of_their_storage(
    redis_url: str, queue: str
) -> None:
    keys = Keys()
    async with AsyncClient(redis_url, queue, result_ttl_s=3600) as client:
        submitted = await client.submit(embed={"inputs": ["a"]}, stream=False)  # type: ignore[call-arg]
        calling = asyncio.create_task(client.embed(["a"]))
        while len(jobs := await client.jobs()) < 2:  # noqa: ASYNC110  # Redis has no event
            await asyncio.sleep(0.01)
        (called,) = {job.job_id for job in jobs} - {submitted.id}
        redis = client.connection.redis
        stored_ms = [int(await redis.hget(keys.of_job(each).job, "ttl_ms") or 0) for each in (submitted.id, called)]
        calling.cancel()
    assert stored_ms == [3_600_000, 120_000]


async def test_the_embeddings_of_a_call_that_can_be_repeated_are_stored_as_long_as_other_results(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=3600) as client:
        calling = asyncio.create_task(client.embed(["a"], idempotency_key="k"))
        while not (jobs := await client.jobs()):  # noqa: ASYNC110  # Redis has no event
            await asyncio.sleep(0.01)
        stored_ms = await client.connection.redis.hget(Keys().of_job(jobs[0].job_id).job, "ttl_ms")
        calling.cancel()
    assert stored_ms == b"3600000"
