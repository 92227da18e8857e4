"""The metrics of all queues and workers, as one scrape reads them from Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.fake_redis import replace_redis

from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.metric_definitions import Samples
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.redis.server_state import ServerMemory
from llamaq.common.settings import client_settings
from llamaq.producer import AsyncClient
from llamaq.producer.queries.metrics import FIND_QUEUES_EVERY_S, MetricsReader
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.testing import FakeWorker

TIMEOUT_S = 60.0


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    return replace_redis(monkeypatch)


async def read(reader: MetricsReader, url: str, timeout_s: float = TIMEOUT_S) -> Samples:
    connection = QueueConnection(client_settings(redis_url=url))
    try:
        return await reader.read(connection, timeout_s)
    finally:
        await connection.aclose()


async def test_a_queue_has_its_depth_its_mode_its_dead_letters_and_its_workers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def memory(_: object) -> tuple[ServerMemory, ...]:
        return (ServerMemory("", 3, 4),)

    monkeypatch.setattr("llamaq.producer.queries.metrics.read_server_memory", memory)  # the fake has no INFO
    async with AsyncClient(url, "a", partitions=2) as client, FakeWorker(url, "a") as worker:
        jobs = [await client.submit("hello") for _ in range(3)]
        await client.submit("hello", delay_s=60)
        await jobs[0].cancel()
        await client.pause()
        await worker.announce(now_ms=1)
        await worker.redis.xadd(worker.keys.dead("a", 0), {"job": "x", "reason": "y"})
        samples = await read(MetricsReader(), url)
    assert {family for family, _ in samples} == {*f.QUEUE_FAMILIES, *f.WORKER_FAMILIES, *f.READER_FAMILIES}
    assert samples.values[f.REDIS_USED_MEMORY] == {("",): 3}
    assert samples.values[f.REDIS_MAXMEMORY] == {("",): 4}
    of_queue = {family: values["a",] for family, values in samples if family.labels == ("queue",)}
    assert of_queue[f.WAITING_JOBS] == 2
    assert of_queue[f.DELAYED_JOBS] == 1
    assert of_queue[f.RUNNING_JOBS] == 0
    assert of_queue[f.DEAD_LETTERS] == 1
    assert of_queue[f.WORKERS] == 1
    assert {mode for (_, mode), value in samples.values[f.QUEUE_MODE].items() if value} == {"paused"}
    assert samples.values[f.JOBS_SUBMITTED]["a", "interactive"] == 4, "the sum over both partitions"
    assert samples.values[f.JOBS_ENDED]["a", "interactive", "finished", "cancelled"] == 1
    assert set(samples.values[f.SLOTS_FREE]) == {("a", "fake")}


async def test_all_queues_are_read_and_new_ones_are_found_after_a_while(url: str) -> None:
    now_s = 0.0
    reader = MetricsReader(clock=lambda: now_s)
    for queue in ("b", "a"):
        async with AsyncClient(url, queue) as client:
            await client.submit("hello")
        found = await read(reader, url)
        assert {queue for (queue,) in found.values[f.WAITING_JOBS]} == {"b"}
    now_s += FIND_QUEUES_EVERY_S
    assert [queue for (queue,) in (await read(reader, url)).values[f.WAITING_JOBS]] == ["a", "b"]


async def test_only_the_named_queues_are_read_also_if_they_do_not_exist_yet(url: str) -> None:
    async with AsyncClient(url, "other") as client:
        await client.submit("hello")
    samples = await read(MetricsReader(["mine"]), url)
    assert samples.values[f.WAITING_JOBS] == {("mine",): 0}
    assert samples.values[f.OLDEST_WAITING] == {("mine",): 0}


async def test_named_queues_whose_workers_have_stored_their_settings_are_not_searched(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(url, "mine", partitions=4) as client:
        for _ in range(8):
            await client.submit("hello")
        searched = await read(MetricsReader(["mine"]), url)
        stored: Any = QueueConfig(4, 0, 1000, "model", "name").fields()
        await client.redis.hset(client.keys.config("mine", 0), mapping=stored)
    monkeypatch.setattr("llamaq.producer.queries.metrics.find_queues", None)  # it would examine every key of Redis
    samples = await read(MetricsReader(["mine"]), url)
    assert samples.values[f.WAITING_JOBS] == searched.values[f.WAITING_JOBS] == {("mine",): 8}


async def test_counters_that_another_client_has_overwritten_are_zero(url: str) -> None:
    async with AsyncClient(url, "a") as client:
        await client.submit("hello")
        await client.redis.set(client.keys.metrics("a", 0), "not a hash")
        samples = await read(MetricsReader(), url)
    assert samples.values[f.JOBS_SUBMITTED]["a", "interactive"] == 0
    assert samples.values[f.WAITING_JOBS]["a",] == 1


async def test_a_redis_that_does_not_answer_in_time_is_not_up(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("llamaq.producer.queries.metrics.find_queues", never)
    samples = await read(MetricsReader(), url, timeout_s=0.01)
    assert samples.values == {f.REDIS_UP: {(): 0}}
    assert "metrics.redis_error error=no answer within 0.01 s" in caplog.text
