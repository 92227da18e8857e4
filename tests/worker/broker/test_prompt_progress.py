"""The progress of a prompt is published before the first token, once, and by the newest attempt only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.outbox_rig import OutboxRig, working

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.producer import AsyncJob
from llamaq.worker.broker import outbox as outbox_module
from llamaq.worker.broker.job_progress import MAX_UNSENT_PROGRESS
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import PromptAdvanced


async def advance(at: OutboxRig, job: Job, processed: int) -> None:
    progress = PromptProgress(total_tokens=99, cached_tokens=0, processed_tokens=processed, time_ms=1.5)
    at.outputs.put([PromptAdvanced(job, progress)])
    await asyncio.sleep(0)


async def published(redis: Redis, job: AsyncJob, work: Any) -> list[str]:
    """Return what is published for a job while `work` runs: the type of each event, or how much is processed."""
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(job._keys.channel)
        await pubsub.get_message(timeout=60)
        await work
        await redis.publish(job._keys.channel, b"end")
        found = []
        while (message := await pubsub.get_message(ignore_subscribe_messages=True, timeout=60))["data"] != b"end":
            event = codec.decode_event(message["data"])
            found.append(str(event.processed_tokens) if isinstance(event, PromptProgress) else event.type)
        return found


async def test_progress_is_published_before_the_tokens_and_is_not_stored(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()

        async def run() -> None:
            await advance(at, running, 8)
            await advance(at, running, 16)
            await at.outbox.flush()
            await advance(at, running, 20)
            await at.put(running, 1)
            await at.outbox.flush()
            await at.outbox.flush()

        assert await published(at.client.redis, job, run()) == ["8", "16", "20", "tokens"]
        assert [event.type for event in await at.events(job)] == ["started", "tokens"]


async def test_progress_is_published_at_once_although_the_job_has_no_new_tokens(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(redis_url, queue) as at, at.client.redis.pubsub() as pubsub:
        job, running = await at.begin()
        await pubsub.subscribe(job._keys.channel)
        await pubsub.get_message(timeout=60)
        monkeypatch.setattr(outbox_module, "POLL_S", 3600.0)
        task = asyncio.create_task(at.outbox.run())
        await advance(at, running, 8)
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=30)
        await cancel_tasks(task)
        assert codec.is_prompt_progress(message["data"])


@pytest.mark.parametrize("streams", [True, False])
async def test_a_job_that_ends_with_its_first_flush_has_told_its_progress(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, streams=streams) as at:
        job, running = await at.begin()

        async def run() -> None:
            await advance(at, running, 20)
            await at.put(running, 1)
            await at.end(running, 1)
            await at.outbox.flush()

        expected = ["20", "tokens", "finished"] if streams else ["20", "finished"]
        assert await published(at.client.redis, job, run()) == expected


async def test_an_attempt_that_has_lost_its_lease_publishes_none(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        await at.client.redis.hincrby(at.client.keys.of_job(job.id).job, "attempt", 1)

        async def run() -> None:
            await advance(at, running, 8)
            await at.outbox.flush()

        assert await published(at.client.redis, job, run()) == []


async def test_while_redis_is_away_the_newest_progress_is_kept(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        n_reports = MAX_UNSENT_PROGRESS + 10

        async def refuse(*_: object, **__: object) -> None:
            raise RedisConnectionError("away")

        async def run() -> None:
            with monkeypatch.context() as context:
                context.setattr(at.outbox._flushes._scripts, "flush", refuse)
                for number in range(n_reports):
                    await advance(at, running, number)
                with pytest.raises(RedisConnectionError):
                    await at.outbox.flush()
            await at.outbox.flush()

        expected = [str(number) for number in range(10, n_reports)]
        assert await published(at.client.redis, job, run()) == expected
