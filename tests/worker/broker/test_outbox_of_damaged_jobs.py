"""The outbox when another client of Redis has overwritten keys of a job: no other job is affected."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest
from tests.support.outbox_rig import AT_ONCE, working

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_events import Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.producer import JobFailed
from llamaq.worker.core.job import Job, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn


@pytest.mark.parametrize("streams", [True, False])
async def test_overwritten_events_affect_one_job_alone_and_are_written_again(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=streams) as at:
        broken, first = await at.begin()
        sound, second = await at.begin()
        await at.put(first, 0, 1)
        await at.outbox.flush()
        await at.client.redis.set(at.client.keys.of_job(broken.id).events, "not a stream")
        await at.put(first, 2)
        await at.put(second, 7, 8)
        await at.outbox.flush()
        assert [event.tokens for event in await at.events(sound) if isinstance(event, Tokens)] == [(7, 8)]
        await at.outbox.flush()
        assert await at.stored(broken) == [0, 1, 2]


@pytest.mark.parametrize("streams", [True, False])
async def test_events_overwritten_before_the_end_of_a_job_are_written_again_with_the_end(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, streams=streams) as at:
        job, running = await at.begin()
        await at.put(running, 0, 1)
        await at.outbox.flush()
        await at.client.redis.set(at.client.keys.of_job(job.id).events, "not a stream")
        await at.put(running, 2)
        await at.end(running, 3)
        for _ in range(2):
            await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        chunks = [chunk async for chunk in at.client.job(job.id).stream()]
        assert "".join(chunk.text for chunk in chunks) == (await job.result()).text == "abc"
        assert [(ended.job_id, ended.stats) for ended in at.engine.finished] == [(job.id, JobStats(generated_tokens=3))]


@pytest.mark.parametrize("count", ["-1", "1.5", "nan", "1e400", "99999999999999999999", "1000000"])
@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_damaged_number_of_stored_tokens_affects_one_job_alone(
    redis_url: str, queue: str, count: str, has_ended: bool
) -> None:
    async with working(redis_url, queue) as at:
        broken, first = await at.begin()
        sound, second = await at.begin()
        await at.put(first, 0, 1)
        await at.outbox.flush()
        await at.client.redis.hset(at.client.keys.of_job(broken.id).job, "generated", count)
        if not has_ended:
            await at.outbox.flush()
        await at.put(first, 2)
        await at.put(second, 7, 8)
        stats = JobStats(generated_tokens=3)
        at.outputs.put([JobEnded(first, stats, reason=FinishReason.LENGTH, text="!")])  # withheld until the end
        await at.end(second, 2)
        async with asyncio.timeout(10):
            await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        assert [(await job.result()).text for job in (broken, sound)] == ["abc!", "hi"]


async def test_the_end_of_a_job_does_not_repeat_tokens_of_a_flush_whose_reply_was_lost(
    redis_url: str, queue: str
) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        await at.client.redis.hset(at.client.keys.of_job(job.id).job, "events_ttl_ms", 60_000)
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        next(iter(at.outbox._jobs)).stored.n_tokens = 0  # as if the connection had been cut before the reply
        await at.put(running, 3)
        await at.end(running, 4)
        await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        assert await at.stored(job) == [0, 1, 2, 3]
        assert (await job.result()).text == "abcd"


async def test_a_rejected_job_ends_although_its_events_were_overwritten(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        await at.client.redis.delete(at.client.keys.of_job(job.id).events)
        await at.client.redis.hset(at.client.keys.of_job(job.id).events, "not", "a stream")
        at.outbox.reject(running.lease, JobRejected(ErrorCode.INVALID_GRAMMAR, "no root"))
        for _ in range(2):
            await at.outbox.flush()
        with pytest.raises(JobFailed, match="no root"):
            await job.result()


async def test_a_second_claim_with_the_same_number_replaces_the_first_attempt(redis_url: str, queue: str) -> None:
    """A failover that has lost the first claim gives the second one the same number."""
    async with working(redis_url, queue) as at:
        job, old = await at.begin()
        lease = dataclasses.replace(old.lease)
        at.outbox.register(lease, at.attempts[job.id], JobTimes())
        assert at.engine.released == [old.lease]
        new = Job(lease, old.request, [1], sampler=cast(Any, None), detokenizer=cast(Any, None))
        assert not at.outbox.set_prepared(PreparedJob(old, []))
        assert at.outbox.set_prepared(PreparedJob(new, []))
        await at.put(old, 9, 9)
        at.outputs.put([JobWithdrawn(old)])
        await at.put(new, 7)
        await at.outbox.flush()
        assert await at.stored(job) == [7]
        assert at.outbox.n_running == 1, "the withdrawal of the first attempt does not requeue the second one"


@pytest.mark.parametrize("has_ended", [False, True])
async def test_only_the_job_whose_hash_was_overwritten_is_lost(redis_url: str, queue: str, has_ended: bool) -> None:
    async with working(redis_url, queue) as at:
        broken, first = await at.begin()
        sound, second = await at.begin()
        await at.client.redis.set(at.client.keys.of_job(broken.id).job, "not a hash")
        await at.put(first, 0)
        await at.put(second, 7, 8)
        if has_ended:
            await at.end(first, 1)
        await at.outbox.flush()
        assert await at.stored(sound) == [7, 8]
        assert at.outbox.n_jobs == 1
        assert at.engine.released == [first.lease]
