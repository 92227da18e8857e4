"""A worker joins and leaves a queue, and its upkeep repairs what failures left behind, on a real Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.support.job_claims import worker_queue
from tests.support.reclaims import reclaim
from tests.worker.broker.test_suspects import FOREVER

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.redis.connect import connect
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import queue_membership
from llamaq.worker.broker.queue_membership import QueueMembership
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.broker.worker_queue import WorkerQueue

EXPIRED_IDLE_MS = 10**11
"""The idle time of an entry whose lease has expired (_lib.lua)."""
CONFIG = QueueConfig(partitions=2, max_queue=7, lease_ms=10_000, model="aa", model_name="one.gguf")


@asynccontextmanager
async def at(redis_url: str) -> AsyncIterator[Redis]:
    redis = connect(redis_url, name="test")
    try:
        yield redis
    finally:
        await redis.aclose()


async def register(redis: Redis, queue: str, worker: str) -> None:
    """Register a live worker, as its heartbeat does."""
    seconds, _ = await redis.time()
    await redis.zadd(Keys().workers(queue), {worker: int(seconds) * 1000})
    await redis.hset(Keys().worker(worker), "worker", "card")
    await redis.expire(Keys().worker(worker), 60)


def membership_of(redis: Redis, queue: str, worker: str, config: QueueConfig) -> QueueMembership:
    return QueueMembership(WorkerQueue(redis, Keys(), queue, config.partitions), worker, config)


async def consumers(redis: Redis, stream: str) -> dict[str, int]:
    found: Any = await redis.xinfo_consumers(stream, GROUP)
    return {one["name"].decode(): one["pending"] for one in found}


async def test_a_worker_with_other_partitions_than_the_live_workers_is_refused(redis_url: str, queue: str) -> None:
    async with at(redis_url) as redis:
        await membership_of(redis, queue, "one", CONFIG).join()
        await register(redis, queue, "one")
        other = membership_of(redis, queue, "two", replace(CONFIG, partitions=3))
        with pytest.raises(InvalidSettings, match=r"LLAMAQ_PARTITIONS.*has 3.*have 2"):
            await other.join()
        assert await QueueConfig.read(redis, Keys(), queue, 0) == CONFIG


async def test_a_worker_that_computes_embeddings_does_not_join_a_queue_that_generates_text(
    redis_url: str, queue: str
) -> None:
    embedding = replace(CONFIG, kind=JobKind.EMBEDDING)
    async with at(redis_url) as redis:
        await membership_of(redis, queue, "one", CONFIG).join()
        await register(redis, queue, "one")
        with pytest.raises(InvalidSettings, match=r"LLAMAQ_QUEUE.* run generation jobs.* runs embedding jobs"):
            await membership_of(redis, queue, "two", embedding).join()
        await redis.zrem(Keys().workers(queue), "one")
        await membership_of(redis, queue, "two", embedding).join()
        assert await QueueConfig.read(redis, Keys(), queue, 0) == embedding


async def test_a_worker_takes_over_the_settings_of_a_queue_without_live_workers(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with at(redis_url) as redis:
        await membership_of(redis, queue, "one", replace(CONFIG, partitions=3)).join()
        await redis.xadd(Keys().jobs(queue, 2, Priority.BULK), {"id": "left"})
        await membership_of(redis, queue, "two", CONFIG).join()
        for partition in range(2):
            assert await QueueConfig.read(redis, Keys(), queue, partition) == CONFIG
        closed = await QueueConfig.read(redis, Keys(), queue, 2)
        assert closed is not None
        assert closed.partitions == 2, "a client that submits there learns that no worker reads the partition"
        assert "queue.jobs_left" in caplog.text


async def test_a_worker_with_another_model_or_lease_starts_with_a_warning(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with at(redis_url) as redis:
        await membership_of(redis, queue, "one", CONFIG).join()
        await register(redis, queue, "one")
        await membership_of(redis, queue, "same", CONFIG).join()
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        other = replace(CONFIG, model="bb", model_name="two.gguf", lease_ms=3000)
        await membership_of(redis, queue, "two", other).join()
        assert "queue.other_model" in caplog.text
        assert "one.gguf" in caplog.text
        assert "queue.other_lease" in caplog.text


async def test_deleted_settings_are_stored_again(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_membership, "UPKEEP_EVERY_S", 0.01)
    async with at(redis_url) as redis:
        membership = membership_of(redis, queue, "one", CONFIG)
        await membership.join()
        await redis.delete(*(Keys().config(queue, partition) for partition in range(2)))
        running = asyncio.create_task(membership.run())
        for partition in range(2):
            while await QueueConfig.read(redis, Keys(), queue, partition) != CONFIG:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_workers_without_a_heartbeat_are_removed_from_the_list(redis_url: str, queue: str) -> None:
    async with at(redis_url) as redis:
        dead: dict[Any, float] = {f"dead-{number}": 1000 for number in range(8)}
        await redis.zadd(Keys().workers(queue), dead | {b"\xff\xfe": 1000})  # another client wrote the last one
        await register(redis, queue, "alive")
        await membership_of(redis, queue, "new", CONFIG).join()
        await membership_of(redis, queue, "new", CONFIG).join()
        assert await redis.zrange(Keys().workers(queue), 0, -1) == [b"alive"]


async def sweep_all(scripts: UpkeepScripts, live: list[str]) -> list[str]:
    """Sweep the whole database in small steps."""
    repaired = []
    for _ in range(2000):
        repaired += await scripts.sweep(0, live, pause_s=0, n_keys=50)
        if repaired:
            break
    return repaired


@pytest.mark.parametrize("loss", ["entry", "pending", "stream", "damaged field", "deleted field"])
async def test_a_job_that_lost_its_entry_gets_one_again_and_runs(redis_url: str, queue: str, loss: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        stream = Keys().jobs(queue, 0, Priority.INTERACTIVE)
        claim = await worker.claim()
        assert claim is not None
        if loss == "entry":
            await worker.redis.xack(stream, GROUP, claim.entry_id)
            await worker.redis.xdel(stream, claim.entry_id)
        elif loss == "pending":  # as after the deletion of a consumer with pending entries
            await worker.redis.xack(stream, GROUP, claim.entry_id)
        elif loss == "stream":
            await worker.redis.delete(stream)
        else:
            key = client.keys.of_job(job.id).job
            await (worker.redis.hset(key, "entry", "x") if loss == "damaged field" else worker.redis.hdel(key, "entry"))
            assert await worker.begin(claim) is None, "the entry is dropped, because it is not that of the job"
        scripts = UpkeepScripts(worker_queue(worker))
        assert await sweep_all(scripts, []) == [job.id]
        if loss == "stream":
            await worker.redis.xgroup_create(stream, GROUP, id="0")
        entries = await worker.claim_scripts.read_unclaimed(stream, 1, 1000) or await reclaim(
            worker, stream, 1, 1000, trusted_until_ms=FOREVER
        )
        assert [fields[b"id"] for _, fields, _ in entries] == [job.id.encode()]
        assert [await scripts.sweep(0, [], pause_s=0) for _ in range(3)] == [[]] * 3


async def test_the_other_keys_of_a_deleted_job_are_deleted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        kept, deleted = [await client.submit("hello", idempotency_key=key) for key in ("kept", "deleted")]
        for _ in range(2):
            await (await worker.start_next()).emit([1], "a")
        await client.redis.delete(client.keys.of_job(deleted.id).job)
        scripts = UpkeepScripts(worker_queue(client))
        n_keys = 10 * int(await client.redis.dbsize())
        assert await scripts.sweep(0, [], pause_s=0, n_keys=n_keys) == []
        assert await client.redis.get(client.keys.idempotency(queue, 0, "kept")) == kept.id.encode()
        assert await client.redis.exists(client.keys.idempotency(queue, 0, "deleted")) == 0
        n_events = [await client.redis.xlen(client.keys.of_job(job.id).events) for job in (kept, deleted)]
        assert n_events == [2, 0]


async def test_events_that_outlive_the_hash_of_their_job_are_kept(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue, result_ttl_s=0.001, event_ttl_s=60) as client,
        FakeWorker(redis_url, queue) as worker,
    ):
        job = await client.submit("hello")
        await (await worker.start_next()).finish(tokens=[1], text="a")
        keys = client.keys.of_job(job.id)
        while await client.redis.exists(keys.job):  # noqa: ASYNC110  # the clock of Redis decides
            await asyncio.sleep(0.01)
        scripts = UpkeepScripts(worker_queue(client))
        await scripts.sweep(0, [], pause_s=0, n_keys=10 * int(await client.redis.dbsize()))
        assert await client.redis.xlen(keys.events)


async def test_a_hash_that_is_no_job_gets_one_entry_at_most_and_does_not_end_the_upkeep(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        redis: Any = worker.redis
        stream = Keys().jobs(queue, 0, Priority.INTERACTIVE)
        job = await client.submit("hello")
        key = client.keys.of_job(job.id).job
        for name in (b"\xff\xfe", b"nonsense", b"other.0." + b"0" * 32):
            await redis.copy(key, key.removesuffix(job.id).encode() + name)
        await redis.delete(stream)
        await redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        scripts = UpkeepScripts(WorkerQueue(redis, Keys(), queue, 1))
        n_keys = 10 * int(await redis.dbsize())
        assert await scripts.sweep(0, [], pause_s=0, n_keys=n_keys) == [job.id]
        assert await redis.xlen(stream) == 4
        for entry, fields in await redis.xrange(stream):
            if fields[b"id"] != job.id.encode():
                await redis.xdel(stream, entry)  # as when it has become a dead letter
        assert await scripts.sweep(0, [], pause_s=0, n_keys=n_keys) == []
        assert await redis.xlen(stream) == 1


async def test_jobs_that_wait_run_or_have_ended_are_left_alone_by_the_sweep(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        ended, running, _, _ = [await client.submit("hello") for _ in range(4)]
        for job in (ended, running):
            claim = await worker.claim()
            assert claim is not None
            attempt = await worker.begin(claim)
            assert attempt is not None
            await attempt.emit([1], "a")
            if job is ended:
                await attempt.finish()
        await worker.claim()
        scripts = UpkeepScripts(worker_queue(worker))
        n_keys = await worker.redis.dbsize()
        for _ in range(2):
            assert await scripts.sweep(0, [], pause_s=0, n_keys=10 * n_keys) == []


async def test_workers_share_the_steps_of_a_sweep(redis_url: str, queue: str) -> None:
    async with at(redis_url) as redis:
        state = Keys().sweep(queue, 0)
        await redis.delete(state)
        scripts = UpkeepScripts(WorkerQueue(redis, Keys(), queue, 1))
        await scripts.sweep(0, [], n_keys=1)
        first = await redis.hgetall(state)
        await scripts.sweep(0, [], n_keys=1)
        assert await redis.hgetall(state) == first


async def test_a_sweep_does_not_wait_until_a_clock_that_was_set_back_shows_the_old_time_again(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("hello")
        await client.redis.delete(Keys().jobs(queue, 0, Priority.INTERACTIVE))
        await client.redis.hset(Keys().sweep(queue, 0), "next_ms", FOREVER)
        scripts = UpkeepScripts(worker_queue(client))
        assert await scripts.sweep(0, [], n_keys=100_000) == [job.id]


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_the_lease_of_a_running_job_expires_in_time_although_the_clock_was_set_back(
    redis_url: str, queue: str, *, is_damaged: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        scripts = UpkeepScripts(worker_queue(client))
        for _ in range(2):
            await client.submit("hello")
        attempts = [await worker.start_next() for _ in range(2)]
        if is_damaged:  # by another client: the other job is examined all the same
            await client.redis.set(client.keys.of_job(attempts[0].claim.job_id).job, "x", ex=60)
            attempts.reverse()
        stream, redis = attempts[0].claim.stream, client.redis

        async def idle_ms() -> list[int]:
            pending: Any = await redis.xpending_range(stream, GROUP, "-", "+", 10, worker.name)
            found = {one["message_id"].decode(): one["time_since_delivered"] for one in pending}
            return [found[attempt.claim.entry_id] for attempt in attempts]

        async def renew(idle: int, entry: str) -> None:
            await redis.xclaim(stream, GROUP, worker.name, 0, [entry], idle=idle, justid=True)

        await renew(EXPIRED_IDLE_MS - LEASE_MS - 3_600_000, attempts[0].claim.entry_id)  # before an hour was set back
        await renew(EXPIRED_IDLE_MS - LEASE_MS // 2, attempts[1].claim.entry_id)  # after that
        await redis.hset(Keys().sweep(queue, 0), "next_ms", FOREVER)
        await scripts.sweep(0, [worker.name])
        first, second = await idle_ms()
        assert EXPIRED_IDLE_MS - LEASE_MS <= first < EXPIRED_IDLE_MS - LEASE_MS // 2
        assert second >= EXPIRED_IDLE_MS - LEASE_MS // 2, "a lease that is not longer than usual is not renewed"
        await renew(EXPIRED_IDLE_MS - 1, attempts[0].claim.entry_id)
        await redis.hset(Keys().sweep(queue, 0), "next_ms", FOREVER)
        await scripts.sweep(0, [worker.name])
        assert (await idle_ms())[0] >= EXPIRED_IDLE_MS - 1, "it is renewed once"


async def test_consumers_of_dead_workers_without_entries_are_removed(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamaq.worker.broker.upkeep_scripts.IDLE_CONSUMER_S", 0)
    async with at(redis_url) as redis:
        stream = Keys().jobs(queue, 0, Priority.BULK)
        await redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        for name in ("waiting", "dead", "alive", "busy"):
            await redis.xgroup_createconsumer(stream, GROUP, name)
        await redis.xadd(stream, {"id": "x"})
        await redis.xreadgroup(GROUP, "busy", {stream: ">"})
        await UpkeepScripts(WorkerQueue(redis, Keys(), queue, 1)).sweep(0, ["alive"], pause_s=0)
        assert await consumers(redis, stream) == {"waiting": 0, "alive": 0, "busy": 1}


async def test_leaving_requeues_all_entries_of_the_worker_in_one_step(redis_url: str, queue: str) -> None:
    async with at(redis_url) as redis:
        membership = membership_of(redis, queue, "leaving", replace(CONFIG, partitions=1))
        stream = Keys().jobs(queue, 0, Priority.INTERACTIVE)
        await redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        for number in range(1500):
            await redis.xadd(stream, {"id": str(number)})
        await redis.xreadgroup(GROUP, "leaving", {stream: ">"}, count=1500)
        n_delivered, has_delivered = 0, asyncio.Event()

        async def deliver() -> None:
            """Deliver entries to the leaving consumer while it leaves."""
            nonlocal n_delivered
            while True:
                await redis.xadd(stream, {"id": "late"})
                n_delivered += len(await redis.xreadgroup(GROUP, "leaving", {stream: ">"}) or ())
                has_delivered.set()

        delivering = asyncio.create_task(deliver())
        await has_delivered.wait()
        await membership.leave()
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
        summary: Any = await redis.xpending(stream, GROUP)
        assert n_delivered
        assert summary["pending"] >= 1500 + n_delivered, "no delivered entry was dropped"


async def test_a_damaged_job_does_not_keep_the_others_in_a_paused_queue_or_with_a_dead_worker(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        damaged, other = [await client.submit("hello") for _ in range(2)]
        claims = [claim for _ in range(2) if (claim := await worker.claim())]
        for claim in claims:
            await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
        await client.redis.hset(client.keys.of_job(damaged.id).job, "attempt", "x")
        await client.pause()
        assert (await other.status()).attempt == 2
        await client.resume()
        await worker.claim_scripts.claim_job(claims[1], worker.name, LEASE_MS)
        scripts = UpkeepScripts(worker_queue(worker))
        assert await scripts.release_worker(0, worker.name) == 1
        assert (await other.status()).attempt == 4


async def test_a_dead_worker_is_released_at_once_and_its_crash_counts(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        started, proven, waiting = [await client.submit("hello") for _ in range(3)]
        for job in (started, proven, waiting):
            claim = await worker.claim()
            assert claim is not None
            attempt = await worker.begin(claim)
            assert attempt is not None
            if job is not waiting:
                await attempt.emit([1] if job is proven else [], "a" if job is proven else "")
        scripts = UpkeepScripts(worker_queue(worker))
        stream = Keys().jobs(queue, 0, Priority.INTERACTIVE)
        assert await scripts.release_worker(0, "another") == 0
        assert await scripts.release_worker(0, worker.name) == 3
        assert await scripts.release_worker(0, worker.name) == 0
        taken = await reclaim(worker, stream, 10, 1000, trusted_until_ms=0)
        assert [fields[b"id"].decode() for _, fields, _ in taken] == [started.id, proven.id, waiting.id]
        assert [(await job.status()).crashes for job in (started, proven, waiting)] == [1, 0, 1]
        assert await worker.redis.hget(Keys().metrics(queue, 0), "crashes") == b"3"
        assert worker.name not in await consumers(worker.redis, stream)


async def test_new_partitions_have_the_mode_of_the_queue(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, partitions=2) as client:
        redis = client.redis
        await membership_of(redis, queue, "one", CONFIG).join()
        await client.pause()
        await membership_of(redis, queue, "two", replace(CONFIG, partitions=4)).join()
        modes = [await redis.hget(Keys().config(queue, partition), "mode") for partition in range(4)]
        assert modes == [b"paused"] * 4
        await membership_of(redis, queue, "three", CONFIG).join()
        await client.resume()
        await membership_of(redis, queue, "four", replace(CONFIG, partitions=4)).join()
        assert not any([await redis.hexists(Keys().config(queue, partition), "mode") for partition in range(4)])


async def test_a_client_with_other_partitions_than_the_workers_gets_an_error_at_its_first_submit(
    redis_url: str, queue: str
) -> None:
    async with (
        AsyncClient(redis_url, queue, partitions=2) as client,
        AsyncClient(redis_url, queue, partitions=1) as other,
    ):
        await other.submit("hello")  # no worker has stored the settings of the queue
        await membership_of(client.redis, queue, "one", CONFIG).join()
        await client.submit("hello")
        with pytest.raises(InvalidSettings, match=r"LLAMAQ_PARTITIONS.*has 1.*have 2"):
            await other.submit("hello")
