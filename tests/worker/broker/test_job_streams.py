"""The job streams of several partitions are read fairly, and expired entries are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.claim_scripts import ClaimScripts
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL, Claimant, DueJobs, Reader
from llamaq.common.redis.connect import connect
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer.testing import FakeClaimScripts
from llamaq.worker.broker.job_streams import JobStreams
from llamaq.worker.broker.worker_queue import WorkerQueue

INTERACTIVE, BULK = Priority.INTERACTIVE, Priority.BULK


@asynccontextmanager
async def opened(redis_url: str, queue: str, partitions: int) -> AsyncIterator[tuple[Redis, JobStreams]]:
    redis = connect(redis_url, name="test-streams")
    streams = JobStreams(WorkerQueue(redis, Keys(), queue, partitions), Claimant("w1", 60_000))
    await streams.open()
    try:
        yield redis, streams
    finally:
        await redis.aclose()


async def add(redis: Redis, queue: str, partition: int, priority: Priority, count: int) -> None:
    for number in range(count):
        await redis.xadd(Keys().jobs(queue, partition, priority), {"id": f"{partition}-{number}"})


def counts(found: list[tuple[str, list[Any]]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for stream, entries in found:
        name = stream.partition("{")[2].rpartition(":")
        key = f"{name[0].partition('}')[0].rpartition(':')[2]} {name[2]}"
        totals[key] = totals.get(key, 0) + len(entries)
    return totals


async def test_a_read_of_more_entries_than_one_call_claims_is_fair_and_takes_interactive_jobs_first(
    redis_url: str, queue: str
) -> None:
    count = 2 * MAX_JOBS_IN_CALL
    async with opened(redis_url, queue, 2) as (redis, streams):
        for partition in range(2):
            await add(redis, queue, partition, INTERACTIVE, count)
            await add(redis, queue, partition, BULK, count)
        assert counts(await streams.read(count)) == {
            "0 interactive": MAX_JOBS_IN_CALL, "1 interactive": MAX_JOBS_IN_CALL
        }  # fmt: skip


async def test_one_read_of_all_streams_returns_at_most_the_requested_entries(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 3) as (redis, streams):
        for partition in range(3):
            await add(redis, queue, partition, INTERACTIVE, 4)
            await add(redis, queue, partition, BULK, 4)
        assert sum(counts(await streams.read(5)).values()) == 5
        assert sum(counts(await streams.read(2)).values()) == 2
        # The remaining interactive jobs come first, in every partition.
        last = counts(await streams.read(6))
        assert sum(n for name, n in last.items() if name.endswith("interactive")) == 5
        assert sum(last.values()) == 6
        assert sum(counts(await streams.read(100)).values()) == 11
        assert await streams.read(100) == []


async def test_one_full_partition_can_fill_the_worker_and_a_read_of_one_entry_reaches_all_partitions(
    redis_url: str, queue: str
) -> None:
    async with opened(redis_url, queue, 4) as (redis, streams):
        await add(redis, queue, 2, BULK, 9)
        assert counts(await streams.read(8)) == {"2 bulk": 8}
        assert counts(await streams.read(1)) == {"2 bulk": 1}


async def test_partitions_are_read_in_turn(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 4) as (redis, streams):
        for partition in range(4):
            await add(redis, queue, partition, INTERACTIVE, 3)
        seen: dict[str, int] = {}
        for _ in range(12):
            for name, n in counts(await streams.read(1)).items():
                seen[name] = seen.get(name, 0) + n
        assert seen == {f"{partition} interactive": 3 for partition in range(4)}


@pytest.mark.parametrize("partitions", [1, 2])
async def test_an_expired_entry_is_found_behind_many_with_a_valid_lease(
    redis_url: str, queue: str, partitions: int
) -> None:
    async with opened(redis_url, queue, partitions) as (redis, streams):
        await add(redis, queue, 0, INTERACTIVE, 40)
        stream = Keys().jobs(queue, 0, INTERACTIVE)
        scripts = FakeClaimScripts(redis, Keys())
        streams.observe(0, DueJobs(await server_time_ms(redis), n_given=0, n_open=40, expired=[]), 0)
        await scripts.read_unclaimed(stream, 39, 60_000)
        (taken,) = await scripts.read_unclaimed(stream, 39, 1)  # the lease of this entry expires at once
        while not (found := await streams.reclaim(1)):
            pass
        assert found == [(stream, [taken])]
        assert taken.fields[b"id"] == b"0-39"
        assert await streams.reclaim(1) == []


async def test_deleted_groups_are_created_again(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):
        for read in (streams.read(1), streams.reclaim(1)):
            await redis.delete(*(Keys().jobs(queue, 0, priority) for priority in Priority))
            assert await read == []
        await add(redis, queue, 0, INTERACTIVE, 1)
        assert counts(await streams.read(1)) == {"0 interactive": 1}


async def test_a_partition_that_cannot_be_opened_is_an_error_although_another_one_was_opened(
    redis_url: str, queue: str
) -> None:
    async with connect(redis_url, name="test-streams") as redis:
        stream = Keys().jobs(queue, 1, BULK)
        await redis.set(stream, "not a stream", ex=60)
        streams = JobStreams(WorkerQueue(redis, Keys(), queue, 2), Claimant("w1", 60_000))
        with pytest.raises(ResponseError, match=f"{stream} is not a stream"):
            await streams.open()


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_missing_group_of_one_stream_does_not_hold_back_the_entries_of_another(
    redis_url: str, queue: str, partitions: int
) -> None:
    async with opened(redis_url, queue, partitions) as (redis, streams):
        await add(redis, queue, 0, INTERACTIVE, 2)
        await redis.delete(Keys().jobs(queue, 0, BULK))
        assert counts(await streams.read(5)) == {"0 interactive": 2}
        await streams.read(5)
        await add(redis, queue, 0, BULK, 1)
        assert counts(await streams.read(5)) == {"0 bulk": 1}


async def test_both_priorities_of_one_partition_are_read_in_one_call(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    read = ClaimScripts.read

    async def recorded(scripts: ClaimScripts, reader: Reader, streams: Sequence[str], *args: Any) -> Any:
        calls.append([stream.rpartition(":")[2] for stream in streams])
        return await read(scripts, reader, streams, *args)

    monkeypatch.setattr(ClaimScripts, "read", recorded)
    async with opened(redis_url, queue, 1) as (redis, streams):
        await add(redis, queue, 0, INTERACTIVE, 3)
        await add(redis, queue, 0, BULK, 3)
        assert counts(await streams.read(4)) == {"0 interactive": 3, "0 bulk": 1}
        assert counts(await streams.read(4, [INTERACTIVE])) == {}
        assert counts(await streams.read(1)) == {"0 bulk": 1}
    assert calls == [["interactive", "bulk"], ["interactive"], ["interactive", "bulk"]]


async def test_a_wait_over_many_partitions_takes_no_entry_and_the_next_read_no_more_than_asked_for(
    redis_url: str, queue: str
) -> None:
    async with opened(redis_url, queue, 8) as (redis, streams):
        assert await streams.read(1) == []
        waiting = asyncio.create_task(streams.wait(30))
        for partition in range(8):
            await add(redis, queue, partition, INTERACTIVE, 1)
            await add(redis, queue, partition, BULK, 1)
        await waiting
        pending = [
            (await redis.xpending(Keys().jobs(queue, partition, priority), GROUP))["pending"]
            for partition in range(8)
            for priority in Priority
        ]
        assert pending == [0] * 16
        assert sum(counts(await streams.read(1)).values()) == 1


@pytest.mark.parametrize("partitions", [1, 3])
async def test_a_wait_for_interactive_jobs_does_not_end_for_bulk_jobs(
    redis_url: str, queue: str, partitions: int
) -> None:
    async with opened(redis_url, queue, partitions) as (redis, streams):
        for_any = asyncio.create_task(streams.wait(30))
        for_interactive = asyncio.create_task(streams.wait(30, [INTERACTIVE]))
        await add(redis, queue, partitions - 1, BULK, 1)
        await for_any
        assert not for_interactive.done()
        await add(redis, queue, partitions - 1, INTERACTIVE, 1)
        await for_interactive


async def test_one_call_waits_for_an_entry_and_reads_it(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):
        assert await streams.wait_and_read(0.01, 3) == []
        waiting = asyncio.create_task(streams.wait_and_read(30, 3))
        await until_blocked(redis)
        await add(redis, queue, 0, BULK, 1)
        assert counts(await waiting) == {"0 bulk": 1}
        assert (await redis.xpending(Keys().jobs(queue, 0, BULK), GROUP))["pending"] == 1
        await add(redis, queue, 0, INTERACTIVE, 2)
        await add(redis, queue, 0, BULK, 2)
        assert counts(await streams.wait_and_read(30, 3)) == {"0 interactive": 2, "0 bulk": 1}
        has_read_all = [streams.has_read_all()]
        assert counts(await streams.read(3)) == {"0 bulk": 1}
        assert [*has_read_all, streams.has_read_all()] == [False, True], "it was asked for three"


async def test_the_streams_that_are_read_out_are_known_for_each_priority(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):

        def read_out() -> list[bool]:
            return [streams.has_read_all(), *(streams.has_read_all([priority]) for priority in (INTERACTIVE, BULK))]

        assert read_out() == [False, False, False]
        await streams.read(1, [INTERACTIVE])
        assert read_out() == [False, True, False]
        await add(redis, queue, 0, BULK, 2)
        assert counts(await streams.read(1, [BULK])) == {"0 bulk": 1}
        assert read_out() == [False, True, False], "the entry that it was asked for may not be the last one"
        assert counts(await streams.read(2)) == {"0 bulk": 1}
        assert read_out() == [True, True, True]
        await add(redis, queue, 0, INTERACTIVE, 1)
        assert counts(await streams.read(1)) == {"0 interactive": 1}
        assert read_out() == [False, False, True], "a new entry of the other stream would end the next wait"


async def test_after_a_wait_without_a_read_there_may_be_entries(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (_, streams):
        await streams.read(1)
        await streams.wait(0.01)
        assert not streams.has_read_all([BULK])


async def test_a_new_entry_ends_a_wait_that_follows_cancelled_waits(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):
        for _ in range(3):
            await streams.read(1, [BULK])
            waiting = asyncio.create_task(streams.wait(30, [BULK]))
            await until_blocked(redis)
            await cancel_tasks(waiting)
            assert streams.has_read_all([BULK])
        await add(redis, queue, 0, BULK, 1)
        async with asyncio.timeout(20):
            await streams.wait(30, [BULK])
        assert not streams.has_read_all([BULK])
        assert counts(await streams.read(1, [BULK])) == {"0 bulk": 1}


async def test_an_entry_that_a_pause_left_unread_is_found_although_all_waits_are_cancelled(
    redis_url: str, queue: str
) -> None:
    """A full worker cancels each wait as soon as a slot becomes free, and the entry has ended an earlier wait."""
    config = Keys().config(queue, 0)
    async with opened(redis_url, queue, 1) as (redis, streams):
        await add(redis, queue, 0, BULK, 1)
        await streams.wait(30, [BULK])
        await redis.hset(config, "mode", "paused")
        assert await streams.read(1, [BULK]) == []
        await redis.hdel(config, "mode")
        async with asyncio.timeout(20):
            while streams.has_read_all([BULK]):
                waiting = asyncio.create_task(streams.wait(0.1, [BULK]))
                await asyncio.sleep(0.01)
                await cancel_tasks(waiting)
        assert counts(await streams.read(1, [BULK])) == {"0 bulk": 1}
        await redis.delete(config)
        await streams.close()


async def test_a_wait_ends_although_it_begins_after_its_end_was_asked_for(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):
        waiting = asyncio.create_task(streams.wait_and_read(30, 3))
        await until_blocked(redis)
        await streams.end_wait()
        assert await waiting == []
        assert await streams.wait_and_read(30, 3) == []
        (wake,) = [key async for key in redis.scan_iter(f"*{{{queue}:0}}:wake:*")]
        assert 0 < await redis.ttl(wake) <= 10


async def test_the_groups_are_created_again_by_a_wait_with_a_read(redis_url: str, queue: str) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):
        await redis.delete(*(Keys().jobs(queue, 0, priority) for priority in Priority))
        assert await streams.wait_and_read(0.01, 3) == []
        await add(redis, queue, 0, INTERACTIVE, 1)
        assert counts(await streams.wait_and_read(30, 3)) == {"0 interactive": 1}


async def test_an_entry_that_a_given_up_wait_has_seen_ends_the_next_wait_with_a_read(
    redis_url: str, queue: str
) -> None:
    async with opened(redis_url, queue, 1) as (redis, streams):
        given_up = asyncio.create_task(streams.wait(30))
        await until_blocked(redis)
        await cancel_tasks(given_up)
        assert await streams.read(3) == []
        assert streams.has_read_all()
        await add(redis, queue, 0, INTERACTIVE, 1)
        await until_blocked(redis, is_blocked=False)
        await redis.ping()
        async with asyncio.timeout(20):
            assert counts(await streams.wait_and_read(30, 3)) == {"0 interactive": 1}
        await streams.close()


async def until_blocked(redis: Redis, *, is_blocked: bool = True) -> None:
    """Wait until a command of this client blocks in Redis, or until none does."""
    while is_blocked != any(  # noqa: ASYNC110  # Redis changes it
        one["name"] == "test-streams" and "b" in one["flags"] for one in await redis.client_list()
    ):
        await asyncio.sleep(0.01)
