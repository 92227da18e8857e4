"""The list of a queue's waiting and running jobs, and the purge of waiting jobs."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, FinishReason, InvalidRequest, JobState, Priority
from llamaq.producer.queries import job_list
from llamaq.producer.testing import FakeWorker


async def test_waiting_and_running_jobs_of_all_streams_are_listed_oldest_first(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        bulk = await client.submit("a", priority=Priority.BULK)
        submitted_ms = (await bulk.status()).submitted_ms
        while await server_time_ms(client.redis) == submitted_ms:
            pass  # entries of two streams have an order only if their times differ
        first = await client.submit("b")
        second = await client.submit("c")
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "x y")
        ended = await client.submit("d")
        await ended.cancel()
        found = await client.jobs()
        assert [job.job_id for job in found] == [bulk.id, first.id, second.id]
        assert [job.state for job in found] == [JobState.QUEUED, JobState.RUNNING, JobState.QUEUED]
        assert [job.priority for job in found] == [Priority.BULK, Priority.INTERACTIVE, Priority.INTERACTIVE]
        running = found[1]
        assert (running.attempt, running.worker, running.generated_tokens) == (1, worker.name, 2)
        assert (found[0].attempt, found[0].worker, found[0].cancel_requested) == (0, None, False)
        assert running.submitted_ms == (await first.status()).submitted_ms
        assert 0 <= running.age_s < 60


async def test_the_list_can_be_filtered_and_is_bounded(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_list, "PAGE", 2)
    monkeypatch.setattr(job_list, "REQUESTS_AT_ONCE", 1)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit(str(n), metadata={"user": n % 2, "name": f"n{n}"}) for n in range(5)]
        bulk = await client.submit("x", priority=Priority.BULK)
        await worker.start_next()

        async def ids(**wanted: object) -> list[str]:
            return [job.job_id for job in await client.jobs(**wanted)]  # type: ignore[arg-type]

        assert await ids(limit=3) == [job.id for job in jobs[:3]]
        assert await ids(state=JobState.RUNNING) == [jobs[0].id]
        assert await ids(state=JobState.QUEUED, limit=2) == [jobs[1].id, jobs[2].id]
        assert await ids(state="queued", limit=2) == [jobs[1].id, jobs[2].id]
        assert await ids(priority=Priority.BULK) == [bulk.id]
        assert await ids(metadata={"user": 1}) == await ids(metadata={"user": "1"}) == [jobs[1].id, jobs[3].id]
        assert await ids(metadata={"user": 0, "name": "n2"}) == [jobs[2].id]
        assert await ids(metadata={"nothing": None}) == []
        assert await ids(older_than_s=3600) == []
        with pytest.raises(InvalidRequest, match="state"):
            await client.jobs(state=JobState.FINISHED)


async def test_entries_that_are_not_jobs_are_left_out(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, AsyncClient(redis_url, f"{queue}2") as other:
        stream = Keys().jobs(queue, 0, Priority.INTERACTIVE)
        await client.redis.xadd(stream, {"id": "nonsense"})
        await client.redis.xadd(stream, {"other": "x"})
        await client.redis.xadd(stream, {"id": (await other.submit("x")).id})
        expired = await client.submit("x")
        await client.redis.delete(Keys().of_job(expired.id).job)
        broken = await client.submit("x")
        await client.redis.set(Keys().of_job(broken.id).job, "text")
        good = await client.submit("x")
        unreadable = await client.submit("x", metadata={"a": 1})
        await client.redis.hset(Keys().of_job(unreadable.id).job, "request", "text")
        assert [job.job_id for job in await client.jobs()] == [good.id, unreadable.id]
        assert await client.jobs(metadata={"a": 1}) == ()


async def test_a_job_with_a_damaged_hash_is_listed_with_the_others(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        jobs = [await client.submit("x") for _ in range(2)]
        damaged: dict[Any, Any] = {"attempt": "many", "generated": "many", "submitted_ms": "many", "run_at_ms": "many"}
        await client.redis.hset(client.keys.of_job(jobs[0].id).job, mapping=damaged)
        found = await client.jobs()
        assert {job.job_id for job in found} == {job.id for job in jobs}
        assert {(job.attempt, job.generated_tokens, job.run_at_ms) for job in found} == {(0, 0, None)}


async def test_a_purge_cancels_the_matching_waiting_jobs_and_their_readers_see_it(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, partitions=3) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit("x", metadata={"user": n % 2}) for n in range(6)]
        running = await worker_job(client, worker)
        n_waiting = (await client.queue_depth()).waiting
        assert n_waiting >= 5
        matching = {job.id for job in jobs[::2]} - {running}
        assert set(await client.purge(metadata={"user": 0}, dry_run=True)) == matching
        assert (await client.queue_depth()).waiting == n_waiting
        assert set(await client.purge(metadata={"user": 0})) == matching
        for job in jobs:
            status = await job.status()
            if job.id in matching:
                assert [chunk async for chunk in job.stream()] == []
                assert (await job.result()).finish_reason is FinishReason.CANCELLED
            else:
                assert status.state is (JobState.RUNNING if job.id == running else JobState.QUEUED)
                assert not status.cancel_requested
        assert await client.purge(older_than_s=3600) == ()
        assert len(await client.purge()) == n_waiting - len(matching)
        assert (await client.queue_depth()).waiting == 0


async def worker_job(client: AsyncClient, worker: FakeWorker) -> str:
    """Start a job in partition 0, which is the partition of the fake worker, and return its id."""
    while not [job for job in await client.jobs() if job.job_id.split(".")[1] == "0"]:
        await client.submit("x", metadata={"user": 1})
    attempt = await worker.start_next()
    await attempt.emit([1], "x")
    return attempt.claim.job_id


async def test_a_job_that_starts_during_a_purge_continues(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x")
        cancel = client.connection.scripts.cancel

        async def start_then_cancel(job_id: str, *, only_waiting: bool) -> str:
            attempt = await worker.start_next()
            await attempt.emit([1], "x")
            return await cancel(job_id, only_waiting=only_waiting)

        monkeypatch.setattr(client.connection.scripts, "cancel", start_then_cancel)
        assert await client.purge() == ()
        status = await job.status()
        assert (status.state, status.cancel_requested) == (JobState.RUNNING, False)


async def test_a_client_with_another_number_of_partitions_sees_the_whole_queue(redis_url: str, queue: str) -> None:
    config = QueueConfig(partitions=4, max_queue=0, lease_ms=1000, model="", model_name="")
    async with AsyncClient(redis_url, queue, partitions=4) as client, AsyncClient(redis_url, queue) as reader:
        for partition in range(4):
            await client.redis.hset(client.keys.config(queue, partition), mapping=dict[Any, Any](config.fields()))
        jobs = await client.submit_many([{"prompt": "x"} for _ in range(40)])
        assert (await reader.queue_depth()).waiting == 40
        assert {one.job_id for one in await reader.jobs()} == {job.id for job in jobs}
        assert len(await reader.purge(dry_run=True)) == 40
        await client.redis.xadd(client.keys.dead(queue, 3), {"stream": "s", "entry": "1-0", "reason": "r", "held": "h"})
        assert len(await reader.dead_letters()) == 1
