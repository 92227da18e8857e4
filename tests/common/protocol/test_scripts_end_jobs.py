"""A script that ends a job completes the end, although another key of the partition is overwritten or moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest
from redis.crc import key_slot
from tests.support.fake_redis import url_of_each_server
from tests.support.redis_servers import ClusterServers
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Finished
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.keys import GROUP, JobKeys, Keys
from llamaq.common.protocol.script_types import FinishReply, TerminalWrite
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeWorker

redis_url = url_of_each_server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with ClusterServers(tmp_path_factory.mktemp("nodes")) as servers:
        yield servers


@contextmanager
def slot_moves(servers: ClusterServers, keys: JobKeys, *moved_first: str) -> Iterator[None]:
    """Move the hash slot of a job to another master. The block runs while only the keys `moved_first` have moved."""
    slot = key_slot(keys.job.encode())
    old = servers.master_of(slot)
    new = next(master for master in servers.masters if master is not old)
    with servers.slot_moves(slot, new, *moved_first):
        yield


def terminal_write() -> TerminalWrite:
    finished = Finished(finish_reason=FinishReason.STOP, stats=JobStats())
    return TerminalWrite(finished, {"finish_reason": FinishReason.STOP.value})


async def last_event(redis: Any, keys: JobKeys) -> Any:
    ((_, fields),) = await redis.xrevrange(keys.events, count=1)
    return codec.decode_event(fields[b"e"])


async def assert_ended(redis: Any, keys: JobKeys, reason: FinishReason) -> None:
    """Assert that a finished job has its terminal event, and that its keys expire."""
    event = await last_event(redis, keys)
    assert isinstance(event, Finished)
    assert event.finish_reason == reason
    assert await redis.hget(keys.job, "finish_reason") == reason.value.encode()
    assert not await redis.hexists(keys.job, "request"), "the fields that the result does not need are deleted"
    assert await redis.pttl(keys.job) > 0
    assert await redis.pttl(keys.events) > 0


@pytest.mark.starts_processes
@pytest.mark.parametrize("moves_counters", [False, True], ids=["nothing has moved", "the counters have moved"])
async def test_a_worker_ends_a_job_while_the_slot_moves(
    servers: ClusterServers, queue: str, moves_counters: bool
) -> None:
    async with AsyncClient(servers.url, queue, partitions=1) as client, FakeWorker(servers.url, queue) as worker:
        redis = worker.redis
        await redis.xadd(client.keys.dead(queue, 0), {"reason": "an earlier job"})
        job = await client.submit("hello", idempotency_key="key", deadline_s=1000)
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "ab")
        keys = client.keys.of_job(job.id)
        counters = [client.keys.metrics(queue, 0)] if moves_counters else []
        with slot_moves(servers, keys, *counters):
            reply = await worker.scripts.finish(attempt.increment([3], "c"), terminal_write())
        assert reply == FinishReply("ok")
        await assert_ended(redis, keys, FinishReason.STOP)
        assert await redis.pttl(client.keys.idempotency(queue, 0, "key")) > 0
        assert not (await redis.xpending(keys.interactive, GROUP))["pending"]
        assert (await job.result()).text == "abc"


@pytest.mark.starts_processes
async def test_an_interrupted_job_is_cancelled_while_the_slot_moves(servers: ClusterServers, queue: str) -> None:
    async with AsyncClient(servers.url, queue, partitions=1) as client, FakeWorker(servers.url, queue) as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        keys = client.keys.of_job(job.id)
        with slot_moves(servers, keys):
            assert await job.cancel()
        await assert_ended(worker.redis, keys, FinishReason.CANCELLED)
        result = await job.result()
        assert (result.text, result.finish_reason) == ("a", FinishReason.CANCELLED)


OverwrittenKey = Callable[[Keys, str], str]
OVERWRITTEN: dict[str, OverwrittenKey] = {
    "metrics": lambda keys, queue: keys.metrics(queue, 0),
    "deadlines": lambda keys, queue: keys.deadlines(queue, 0),
    "shares": lambda keys, queue: keys.metrics(queue, 0).removesuffix("metrics") + "shares:interactive",
    "turns": lambda keys, queue: keys.metrics(queue, 0).removesuffix("metrics") + "turns:interactive:ada",
    "stream": lambda keys, queue: keys.metrics(queue, 0).removesuffix("metrics") + "jobs:interactive",
}


@pytest.mark.parametrize("overwritten", OVERWRITTEN.values(), ids=OVERWRITTEN.keys())
async def test_a_job_ends_completely_although_another_key_is_overwritten(
    redis_url: str, queue: str, overwritten: OverwrittenKey
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit("hello", tenant="ada", deadline_s=1000) for _ in range(2)]
        attempts = [await worker.start_next() for _ in jobs]
        for attempt in attempts:
            await attempt.emit([1], "a")
        await worker_scripts(worker).requeue(attempts[1].claim, attempts[1].number)
        key = overwritten(client.keys, queue)
        await worker.redis.set(key, "of another client")
        reply = await worker.scripts.finish(attempts[0].increment(), terminal_write())
        assert reply == FinishReply("ok")
        assert await jobs[1].cancel()
        for job, reason in zip(jobs, (FinishReason.STOP, FinishReason.CANCELLED), strict=True):
            await assert_ended(worker.redis, client.keys.of_job(job.id), reason)
            result = await client.job(job.id).result()
            assert (result.text, result.finish_reason) == ("a", reason)
        await worker.redis.delete(key)  # other tests list all queues


async def test_a_delayed_job_ends_completely_although_the_set_of_delayed_jobs_is_overwritten(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello", delay_s=1000)
        await worker.redis.set(client.keys.later(queue, 0), "of another client")
        assert await job.cancel()
        assert await worker.redis.pttl(client.keys.of_job(job.id).job) > 0
        assert (await job.result()).finish_reason is FinishReason.CANCELLED
        await worker.redis.delete(client.keys.later(queue, 0))


@pytest.mark.parametrize("ttl", ["soon", "", "-1", "1.5", "nan", "1e400", "99999999999999999999"])
async def test_a_job_whose_time_to_live_is_damaged_expires_after_its_end(redis_url: str, queue: str, ttl: str) -> None:
    async with AsyncClient(redis_url, queue, event_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        keys = client.keys.of_job(job.id)
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        await worker.redis.hset(keys.job, mapping={"ttl_ms": ttl, "events_ttl_ms": ttl})
        assert await attempt.finish()
        assert (await job.status()).state is JobState.FINISHED
        assert await worker.redis.pttl(keys.job) > LEASE_MS
        assert await worker.redis.pttl(keys.events) != -1


async def test_a_finished_job_has_only_the_fields_of_its_result(redis_url: str, queue: str) -> None:
    lua = files("llamaq.common.protocol").joinpath("scripts", "_lib.lua").read_text()
    header = lua[: lua.index("local WAITING")]
    names = re.findall(r"^--   (\w+(?:, \w+)*)(?: \(msgpack\))? ", header, re.MULTILINE)
    known = {name for line in names for name in line.split(", ")}
    assert {"request", "run_at_ms", "finished_ms", "finish_reason", "stats", "usage"} <= known
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        keys = client.keys.of_job(job.id)
        attempt = await worker.start_next()
        for name in known:
            await worker.redis.hsetnx(keys.job, name, 1)
        await worker.scripts.finish(attempt.increment([1], "a"), terminal_write())
        fields: Any = await worker.redis.hkeys(keys.job)
        assert {name.decode() for name in fields} == {
            *("status", "attempt", "worker", "crashes", "generated", "submitted_ms", "started_ms", "finished_ms"),
            *("cancel", "finish_reason", "returned", "digest"),
        }
