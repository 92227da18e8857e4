"""A client that reads the output of a job with many logprobs does not stop its other streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.event_loop_gaps import check_gaps

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import FakeWorker

N_TOKENS = 10_000


async def read_result(job: AsyncJob) -> int:
    return len((await job.result(timeout=20)).tokens)


async def read_stream(job: AsyncJob) -> int:
    return sum([len(chunk.tokens) async for chunk in job.stream(timeout=20)])


@pytest.mark.parametrize("read", [read_result, read_stream])
async def test_other_streams_continue_while_a_large_output_is_decoded(
    redis_url: str, queue: str, read: Callable[[AsyncJob], Awaitable[int]]
) -> None:
    logprobs = [TokenLogprobs(-1.0, ((1, -1.0 / number),) * 20) for number in range(1, N_TOKENS + 1)]
    output = codec.encode_output("", [1] * N_TOKENS, logprobs)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        await (await worker.start_next()).finish(tokens=[1], text="a")
        fields: dict[Any, Any] = {"output": output, "generated": N_TOKENS}
        await client.redis.hset(client.keys.of_job(job.id).job, mapping=fields)
        assert await read(client.job(job.id)) == N_TOKENS
        await check_gaps(lambda: codec.decode_output(output), lambda: read(client.job(job.id)))
