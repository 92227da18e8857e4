"""The list of all queues."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest
from tests.support.redis_servers import ClusterServers

from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import serve_settings
from llamaq.producer import AsyncClient, Priority
from llamaq.producer.queries import queue_list
from llamaq.producer.testing import FakeWorker
from llamaq.producer.worker_watch import has_worker


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses, because all tests share one Redis."""
    return f"test:{secrets.token_hex(6)}"


async def test_every_queue_is_listed_with_its_jobs_and_workers(redis_url: str, prefix: str) -> None:
    served = AsyncClient(redis_url, "served", key_prefix=prefix)
    mistyped = AsyncClient(redis_url, "mistyped", key_prefix=prefix, partitions=3)
    other = AsyncClient(redis_url, "other", key_prefix=f"{prefix}2")
    async with served, mistyped, other, FakeWorker(redis_url, "served", key_prefix=prefix) as worker:
        await worker.announce()
        for priority in Priority:
            await served.submit("x", priority=priority)
        await (await worker.start_next()).emit([1], "x")
        for n in range(20):
            await mistyped.submit("x", idempotency_key=str(n))
        await other.submit("x")
        await served.redis.set(f"{prefix}:{{nonsense}}:jobs:bulk", "x")
        first, second = await served.queues()
        assert (first.queue, first.waiting, first.running, first.workers, first.models) == ("mistyped", 20, 0, 0, ())
        assert (second.queue, second.waiting, second.workers, second.models) == ("served", 1, 1, ("fake",))
        assert (first.partitions, second.partitions) == (3, 1)
        assert first.oldest_waiting_s is not None
        assert 0 <= first.oldest_waiting_s < 60
        await mistyped.purge()
        assert (await served.queues())[0].oldest_waiting_s is None


async def test_the_list_is_bounded(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_list, "MAX_STREAMS", 3)
    for number in range(5):
        async with AsyncClient(redis_url, f"q{number}", key_prefix=prefix) as client:
            await client.submit("x")
    async with AsyncClient(redis_url, key_prefix=prefix) as client:
        assert 1 <= len(await client.queues()) <= 3


@pytest.mark.starts_processes
async def test_the_queues_on_all_nodes_of_a_cluster_are_listed(tmp_path: Path) -> None:
    with ClusterServers(tmp_path, n_masters=2) as cluster:
        for name in "abcdef":
            async with AsyncClient(cluster.url, name, partitions=4) as client:
                jobs = [await client.submit("x") for _ in range(8)]
        async with AsyncClient(cluster.url, "f", partitions=4) as client:
            found = await client.queues()
            assert [(queue.queue, queue.waiting) for queue in found] == [(name, 8) for name in "abcdef"]
            assert {job.job_id for job in await client.jobs()} == {job.id for job in jobs}
            assert len(await client.purge()) == 8


async def test_names_of_other_clients_that_are_no_text_do_not_end_the_calls(redis_url: str, prefix: str) -> None:
    """One such member ended every command of an operator, the metrics and the HTTP server."""
    client = AsyncClient(redis_url, "served", key_prefix=prefix, require_worker=True)
    async with client, FakeWorker(redis_url, "served", key_prefix=prefix) as worker:
        await worker.announce()
        now_ms = time.time() * 1000
        await client.redis.zadd(client.keys.workers("served"), {b"\xff": now_ms})
        await client.redis.zadd(client.keys.queues(), {b"\xff": now_ms})
        assert await has_worker(client.redis, client.keys, "served")
        job = await client.submit("x")
        await client.redis.hset(client.keys.of_job(job.id).job, mapping={"tenant": b"\xff"})
        assert [one.card.worker for one in await client.workers()] == ["fake"]
        assert [one.job_id for one in await client.jobs()] == [job.id]
        directory = QueueDirectory(serve_settings(redis_url=redis_url, queue="served", key_prefix=prefix))
        assert "served" in await directory.served()
        await directory.aclose()
