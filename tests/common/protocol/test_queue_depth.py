"""The depth of a queue, counted on fakeredis."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError
from tests.support.fake_redis import replace_redis

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.redis.connect import connect
from llamaq.producer import AsyncClient


async def test_jobs_of_all_partitions_are_counted_before_any_worker_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncClient(replace_redis(monkeypatch), "tests", partitions=3) as client:
        for number in range(6):
            await client.submit("x", priority=tuple(Priority)[number % 2])
        depth = await queue_depth(client.redis, Keys(), "tests", 3)
        assert (depth.waiting, depth.running) == (6, 0)


async def test_a_key_that_is_no_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = connect(replace_redis(monkeypatch), name="test")
    await redis.set(Keys().jobs("tests", 0, Priority.BULK), "no stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await queue_depth(redis, Keys(), "tests", 1)
    await redis.aclose()
