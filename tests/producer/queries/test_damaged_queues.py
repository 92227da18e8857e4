"""A queue whose keys another client of Redis has overwritten does not hide the other queues."""

from __future__ import annotations

import secrets
import time

import pytest

from llamaq.cli.top.header_texts import status_text
from llamaq.cli.top.live_queues import LiveQueues
from llamaq.cli.top.rates import RateTracker
from llamaq.cli.top.summarize_reading import summarize
from llamaq.common.metrics import metric_definitions as f
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import serve_settings
from llamaq.producer import AsyncClient
from llamaq.producer.queries.metrics import MetricsReader
from llamaq.producer.testing import FakeWorker

KEYS = ("jobs:bulk", "later", "turns:bulk", "dead", "workers", "stats")
"""The keys of a queue. A client with a wrong type in one of them could read no queue."""


async def overwrite(client: AsyncClient, queue: str, name: str) -> None:
    """Overwrite a key of a queue that has a job."""
    async with AsyncClient(client.settings.redis_url, queue, key_prefix=client.settings.key_prefix) as other:
        await other.submit("hello")
        partition = "" if name in ("workers", "stats") else ":0"
        await other.redis.set(f"{client.settings.key_prefix}:{{{queue}{partition}}}:{name}", "not of this type")


async def test_the_other_queues_are_read(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    prefix = f"test:{secrets.token_hex(6)}"
    async with AsyncClient(redis_url, "good", key_prefix=prefix) as client:
        await client.submit("hello")
        for number, name in enumerate(KEYS):
            await overwrite(client, f"bad{number}", name)
        queues = [summary.queue for summary in await client.queues()]
        assert "good" in queues

        live, reader = LiveQueues(client), MetricsReader()
        for _ in range(2):
            reading = await live.read(with_waiting=True, with_dead=True)
            samples = await reader.read(client.connection, timeout_s=60)
        shown = [one.queue for one in reading.queues]
        assert shown == ["good"]
        assert reading.damaged_queues == tuple(f"bad{number}" for number in range(len(KEYS)))
        header = status_text("server", summarize(reading, RateTracker()), "")
        assert header.endswith("cannot be read: bad0, bad1, bad2, bad3, bad4, bad5")
        assert samples.values[f.REDIS_UP] == {(): 1}
        assert samples.values[f.WAITING_JOBS]["good",] == 1
    messages = [record.message for record in caplog.records if record.message.startswith("queue.damaged queue=bad1")]
    assert len(messages) == 3, "once each for the list, the view and the metrics"


async def test_a_damaged_heartbeat_hides_no_other_worker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        await client.redis.zadd(client.keys.workers(queue), {f"damaged-{queue}": time.time() * 1000})
        await client.redis.set(client.keys.worker(f"damaged-{queue}"), "not a hash")
        assert [one.card.worker for one in await client.workers()] == ["fake"]


@pytest.mark.parametrize("key", ["workers", "config"])
async def test_the_http_server_serves_the_other_queues(redis_url: str, key: str) -> None:
    prefix = f"test:{secrets.token_hex(6)}"
    async with (
        AsyncClient(redis_url, "good", key_prefix=prefix) as client,
        FakeWorker(redis_url, "good", key_prefix=prefix) as worker,
        FakeWorker(redis_url, "bad", key_prefix=prefix) as damaged,
    ):
        await worker.announce()
        await damaged.announce()
        directory = QueueDirectory(serve_settings(redis_url=redis_url, queue="good", key_prefix=prefix))
        assert (await directory.client("bad")).queue == "bad"
        keys = client.keys
        await client.redis.set(keys.workers("bad") if key == "workers" else keys.config("bad", 0), "not of this type")
        served = await directory.served(is_fresh=True)
        assert len(served["good"]) == 1
        assert (await directory.client("good")).queue == "good"
        await directory.aclose()


async def test_a_queue_with_damaged_settings_is_shown(redis_url: str) -> None:
    async with AsyncClient(redis_url, "good", key_prefix=f"test:{secrets.token_hex(6)}") as client:
        await client.submit("hello")
        await client.redis.hset(client.keys.config("good", 0), mapping={"partitions": "many"})
        live = LiveQueues(client)
        for _ in range(2):
            reading = await live.read()
        assert [one.queue for one in reading.queues] == ["good"]
        assert reading.damaged_queues == ()
