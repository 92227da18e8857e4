"""The searches of the partitions, without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.worker.broker.partition_searches import search_partitions

FULL = 64


async def test_a_full_search_is_followed_at_once_by_the_next_one_and_an_outage_ends_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep, events = asyncio.sleep, list[str]()
    results: Iterator[int | Exception] = iter([FULL, FULL + 1, FULL - 1, RedisConnectionError(), 0])
    has_searched = asyncio.Event()

    async def record_sleep(seconds: float) -> None:
        events.append(f"wait {seconds}")
        await sleep(0)

    async def search(partition: int) -> int:
        result = next(results, None)
        if result is None:
            has_searched.set()
            await sleep(60)
        events.append(f"search {partition}")
        if isinstance(result, Exception):
            raise result
        return result or 0

    monkeypatch.setattr(asyncio, "sleep", record_sleep)
    searching = asyncio.create_task(search_partitions([7], search, every_s=0.5, full=FULL))
    await has_searched.wait()
    searching.cancel()
    wait, found = "wait 0.5", "search 7"
    assert events == [wait, found, found, found, wait, found, wait, found, wait]
