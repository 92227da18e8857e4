"""`llamaq top` reads a real Redis, and acts on it."""

from __future__ import annotations

import pytest
from tests.support.dead_letters import add_dead_letters
from tests.support.worker_cards import KilledWorker

from llamaq.cli.top import live_queues
from llamaq.cli.top.live_queues import LiveQueues
from llamaq.common.errors import InvalidRequest
from llamaq.producer import AsyncClient, JobState, QueueMode
from llamaq.producer.testing import FakeWorker


async def test_a_reading_has_the_jobs_and_workers_of_all_queues(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, "chat", key_prefix=queue) as client,
        FakeWorker(redis_url, "chat", key_prefix=queue) as worker,
    ):
        for _ in range(3):
            await client.submit("x")
        await worker.announce(now_ms=5)
        await (await worker.start_next()).answer(["a", "b"])
        await worker.start_next()
        reading = await LiveQueues(client).read(with_waiting=True)
        (chat,) = reading.queues
        assert (chat.queue, chat.depth.waiting, chat.depth.running, chat.n_dead) == ("chat", 1, 1, 0)
        assert [one.card.worker for one in chat.workers] == ["fake"]
        assert [job.stats.generated_tokens for job in chat.recent] == [2]
        assert abs(chat.recent[0].ended_ms - reading.now_ms) < 60_000
        assert chat.oldest_waiting_s is not None
        (waiting,) = chat.waiting
        assert waiting.state is JobState.QUEUED


async def test_later_readings_add_new_queues_and_the_jobs_that_ended_since(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, "chat", key_prefix=queue) as client,
        FakeWorker(redis_url, "chat", key_prefix=queue) as worker,
        FakeWorker(redis_url, "new", key_prefix=queue) as other,
    ):
        live = LiveQueues(client)
        assert (await live.read()).queues == ()
        await worker.announce()
        await other.announce()
        for _ in range(3):
            await client.submit("x")
            await (await worker.start_next()).finish()
            chat, new = (await live.read()).queues
        assert (chat.queue, new.queue) == ("chat", "new")
        ids = [job.job_id for job in chat.recent]
        assert len(ids) == len(set(ids)) == 3
        assert [job.job_id for job in (await client.stats()).recent] == ids


async def test_a_queue_without_a_worker_is_found_by_its_jobs_and_a_named_one_is_always_shown(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, "mistyped", key_prefix=queue, partitions=2) as client:
        monkeypatch.setattr(live_queues, "SCAN_EVERY_S", 1e9)
        live, named = LiveQueues(client), LiveQueues(client, ["empty"])
        assert (await live.read()).queues == ()
        await client.submit("x")
        assert (await live.read()).queues == (), "all keys are not searched in every reading"
        monkeypatch.setattr(live_queues, "SCAN_EVERY_S", 0.0)
        assert [one.queue for one in (await live.read()).queues] == ["mistyped"]
        assert [one.queue for one in (await named.read()).queues] == ["empty"]
        monkeypatch.setattr(live_queues, "MAX_QUEUES", 0)
        assert (await live.read()).n_hidden_queues == 1


async def test_a_named_queue_has_the_partitions_of_workers_that_start_later(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_queues, "SCAN_EVERY_S", 0.0)
    async with AsyncClient(redis_url, queue) as viewer, AsyncClient(redis_url, queue, partitions=4) as client:
        live = LiveQueues(viewer, [queue])
        assert (await live.read()).queues[0].depth.waiting == 0
        await client.redis.hset(client.keys.config(queue, 0), "partitions", "4")
        for _ in range(4):
            await client.submit("x")
        assert (await live.read()).queues[0].depth.waiting == 4


async def test_a_reading_costs_one_command_for_each_worker_and_few_others(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.submit_many([{"prompt": "x"} for _ in range(100)])
        for number in range(20):
            async with KilledWorker(redis_url, queue, name=f"{queue}-{number}") as worker:
                await worker.announce()
        live = LiveQueues(client, [queue])
        await live.read()
        sent: list[str] = []
        execute = client.redis.execute_command

        async def count(*args: object, **options: object) -> object:
            sent.append(str(args[0]))
            return await execute(*args, **options)  # type: ignore[no-untyped-call]  # redis-py's stub

        client.redis.execute_command = count  # type: ignore[method-assign]
        assert len((await live.read()).queues[0].workers) == 20
        assert len(sent) <= 12, f"beside one pipeline with a command for each worker: {sent}"


async def test_a_queue_is_paused_and_resumed_and_a_job_is_cancelled(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, partitions=2) as client:
        live = LiveQueues(client, [queue])
        job = await client.submit("x")
        await live.read()
        await live.pause(queue)
        assert (await client.queue_depth()).mode is QueueMode.PAUSED
        await live.resume(queue)
        assert (await client.queue_depth()).mode is QueueMode.OPEN
        assert await live.cancel(job.id)
        assert not await live.cancel(job.id)


async def test_a_dead_letter_is_listed_and_retried(redis_url: str, queue: str) -> None:
    letter_id, garbage_id = await add_dead_letters(redis_url, queue)
    async with AsyncClient(redis_url, queue) as client:
        live = LiveQueues(client, [queue])
        (reading,) = (await live.read(with_dead=True)).queues
        assert reading.n_dead == 2
        assert {letter.id for letter in reading.dead} == {letter_id, garbage_id}
        new_id = await live.retry(letter_id)
        assert (await client.job(new_id).status()).state is JobState.QUEUED
        assert (await live.read()).queues[0].n_dead == 1
        with pytest.raises(InvalidRequest):
            await live.retry(garbage_id)
