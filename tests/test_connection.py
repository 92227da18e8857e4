from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from llamaq.common.connection import connect
from llamaq.common.errors import InvalidSettings


async def test_a_cancellation_arrives_whenever_it_comes(redis_url: str) -> None:
    redis = connect(redis_url, name="test")
    for _ in range(3):
        for turns in range(40):
            task = asyncio.ensure_future(redis.get("nothing"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                assert task.cancelled(), f"a cancellation after {turns} turns of the event loop was swallowed"
    assert await redis.set("after", "all") is True
    assert await redis.getdel("after") == b"all"
    await redis.aclose()


async def test_more_commands_at_once_than_connections_wait_for_each_other(redis_url: str) -> None:
    redis = connect(redis_url, name="test-many")
    await asyncio.gather(*(redis.ping() for _ in range(500)))
    listed = await redis.client_list()
    assert 1 <= len([one for one in listed if one["name"] == "test-many"]) <= 32
    await redis.aclose()


def test_what_is_no_url_of_redis_names_the_setting() -> None:
    with pytest.raises(InvalidSettings, match="LLAMAQ_REDIS_URL"):
        connect("localhost:6379", name="test")
