"""The outbox on a real Redis: checkpoints, requeued jobs, and the report of ended jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tests.support.outbox_rig import AT_ONCE, until, working

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import ErrorCode, JobFailed, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.script_types import Attempt, JobEntry, JobFlush
from llamaq.producer.queries.job_records import read_output
from llamaq.producer.testing import LEASE_MS
from llamaq.worker.broker import outbox as outbox_module
from llamaq.worker.broker.outbox_settings import Checkpoints
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.core.job import Job, PreparedJob
from llamaq.worker.core.outputs import NewToken
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn


async def test_a_token_is_stored_at_once(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "POLL_S", 1000.0)
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        flushing = asyncio.create_task(at.outbox.run())
        for number in range(2):  # the first flush is also that of the start
            await at.put(running, number)
            await until(at.stored, job, list(range(number + 1)))
        await cancel_tasks(flushing)


# jobs without per-token events


async def test_a_job_without_per_token_events_is_stored_at_checkpoints_of_tokens(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, checkpoints=Checkpoints(4, 10**6), streams=False) as at:
        job, running = await at.begin()
        for number in range(11):
            await at.put(running, number)
            await at.outbox.flush()
            assert len(await at.stored(job)) == (number + 1) // 4 * 4
        assert await at.stored(job) == list(range(8))
        await at.end(running, 11)
        await at.outbox.flush()
        result = await job.result()
        assert (result.text, result.tokens) == ("abcdefghijk", tuple(range(11)))
        assert "".join([chunk.text async for chunk in job.stream()]) == result.text


async def test_a_job_without_per_token_events_is_stored_at_checkpoints_of_seconds(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=False) as at:
        job, running = await at.begin()
        await at.outbox.flush()
        assert [event.type for event in await at.events(job)] == ["started"], "a checkpoint needs tokens"
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        assert await at.stored(job) == [0, 1, 2]


async def test_checkpoints_are_stored_and_not_published(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=False) as at, at.client.redis.pubsub() as pubsub:
        job, running = await at.begin()
        await pubsub.subscribe(at.client.keys.of_job(job.id).channel)
        await pubsub.get_message(timeout=60)
        await at.put(running, 0, 1)
        await at.outbox.flush()
        await at.put(running, 2)
        await at.end(running, 3)
        await at.outbox.flush()
        message = await pubsub.get_message(timeout=60)
        assert message is not None
        assert codec.decode_event(message["data"]).type == "finished"


async def test_the_offsets_of_tags_are_stored_with_their_text(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, first = await at.begin()

        async def put(running: Job, *tokens: tuple[str, int | None]) -> None:
            at.outputs.put([NewToken(running, 1, text, 0.0, tag_offset=offset) for text, offset in tokens])
            await asyncio.sleep(0)
            await at.outbox.flush()

        await put(first, ("<tag>", 0), ("é", None), ("", 6))
        await put(first, ("<tag><t", 11))  # a stop string withholds the rest
        chunks = job.stream()
        assert [(await anext(chunks)).tag_offsets for _ in range(2)] == [(0,), (6, 11)]
        assert (await read_output(at.client.redis, at.client.keys.of_job(job.id))).tag_offsets == (0, 6, 11)
        second = Job(first.lease, first.request, [1], first.sampler, first.detokenizer, generated_before=[1] * 4)
        prepared = PreparedJob(second, ["<tag>", "é", "", "<tag><t"], tag_offsets=[0, 6, 11])
        assert at.outbox.set_prepared(prepared)
        await put(second, ("", 16))  # its text is part of the stop string
        await at.end(second, 5)
        await at.outbox.flush()
        result = await job.result()
        assert (result.text, result.tag_offsets) == ("<tag>é<tag><t", (0, 6, 11))
        assert [chunk.tag_offsets async for chunk in chunks] == [()]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_job_that_is_cancelled_without_a_worker_has_the_text_that_was_withheld(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=streams) as at:
        job, running = await at.begin()
        at.outputs.put([NewToken(running, 1, "a", 0.0), NewToken(running, 2, "", 0.0, withheld="<ta")])
        await asyncio.sleep(0)
        await at.outbox.flush()
        at.outputs.put([JobWithdrawn(running)])
        await asyncio.sleep(0)
        await at.outbox.flush()
        await job.cancel()
        result = await job.result()
        assert (result.text, result.tokens, result.finish_reason) == ("a<ta", (1, 2), FinishReason.CANCELLED)
        assert "".join([chunk.text async for chunk in job.stream()]) == result.text


@pytest.mark.parametrize("reason", ["withdrawn", "close"])
@pytest.mark.parametrize("streams", [True, False])
async def test_generated_tokens_are_stored_before_a_job_is_requeued(
    redis_url: str, queue: str, streams: bool, reason: str
) -> None:
    async with working(redis_url, queue, streams=streams) as at:
        job, running = await at.begin()
        await at.put(running, 0, 1, 2)
        if reason == "withdrawn":
            at.outputs.put([JobWithdrawn(running)])
            await asyncio.sleep(0)
            await at.outbox.flush()
        else:
            await at.outbox.close()
        assert at.outbox.n_jobs == 0
        assert await at.stored(job) == [0, 1, 2]
        assert (await job.status()).state is JobState.QUEUED
        again = await at.claimer.claim_scripts.claim_job(
            JobEntry(job.id, running.lease.stream, running.lease.entry_id), "other", LEASE_MS
        )
        assert isinstance(again, Attempt)
        assert again.generated == 3


@pytest.mark.parametrize("streams", [True, False])
async def test_a_job_is_requeued_only_after_tokens_lost_in_a_failover_are_stored_again(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=streams) as at:
        job, running = await at.begin()
        keys = at.client.keys.of_job(job.id)
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        await at.client.redis.delete(keys.events)  # a failover to a replica that has not received the last writes
        await at.client.redis.hset(keys.job, "generated", "0")
        await at.put(running, 3)
        await at.outbox.close()
        assert await at.stored(job) == [0, 1, 2, 3]
        assert (await job.status()).state is JobState.QUEUED


async def test_between_two_flushes_of_all_jobs_a_flush_contains_only_the_jobs_with_news(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    flush = WorkerScripts.flush

    async def recorded(scripts: WorkerScripts, flushes: Sequence[JobFlush], *args: Any, **options: Any) -> Any:
        flushed.extend(one.job_id for one in flushes)
        return await flush(scripts, flushes, *args, **options)

    async with working(redis_url, queue) as at:
        silent, _ = await at.begin()
        job, running = await at.begin()
        monkeypatch.setattr(WorkerScripts, "flush", recorded)
        monkeypatch.setattr(outbox_module, "WHOLE_EVERY_S", 3600.0)
        task = asyncio.create_task(at.outbox.run())
        for number in range(5):
            await at.put(running, number)
            await until(at.stored, job, list(range(number + 1)))
        await cancel_tasks(task)
        assert flushed.count(job.id) >= 5
        assert flushed.count(silent.id) == 0, "the last flush of all jobs was less than WHOLE_EVERY_S ago"
        await at.outbox.flush()
        assert flushed.count(silent.id) == 1


async def test_subscribers_are_counted_only_if_the_job_is_cancelled_without_one(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, bool]] = []
    flush = WorkerScripts.flush

    async def recorded(scripts: WorkerScripts, flushes: Sequence[JobFlush], *args: Any, **options: Any) -> Any:
        counted.extend((one.job_id, one.is_watched) for one in flushes)
        return await flush(scripts, flushes, *args, **options)

    monkeypatch.setattr(WorkerScripts, "flush", recorded)
    unused = cast(Any, None)
    async with working(redis_url, queue) as at:
        for is_watched in (False, True):
            job, lease, request = await at.claim(cancel_on_disconnect=is_watched)
            counted.clear()
            await at.outbox.flush()
            assert (job.id, True) in counted, "the request of a job that is not prepared is not known"
            assert at.outbox.set_prepared(PreparedJob(Job(lease, request, [1], unused, unused), []))
            counted.clear()
            await at.outbox.flush()
            assert (job.id, is_watched) in counted


# the report of ended jobs


@pytest.mark.parametrize("how", ["cancel", "queue_timeout_s", "close"])
async def test_the_end_of_a_job_that_waits_in_the_worker_is_reported_once(redis_url: str, queue: str, how: str) -> None:
    async with working(redis_url, queue) as at:
        limit_s = 1000 if how == "queue_timeout_s" else None
        job, lease, request = await at.claim(metadata={"user": "u1"}, queue_timeout_s=limit_s)
        unused = cast(Any, None)
        assert at.outbox.set_prepared(PreparedJob(Job(lease, request, [1], unused, unused), []))
        await at.outbox.flush()
        assert at.engine.finished == []
        if limit_s is None:
            await job.cancel()
        else:
            await at.client.redis.hset(at.client.keys.of_job(job.id).job, "queue_deadline_ms", "1")
            assert await JobScripts(at.claimer.redis, at.claimer.keys).expire(job.id) == "ended"
        for _ in range(2):
            await (at.outbox.close() if how == "close" else at.outbox.flush())
        (ended,) = at.engine.finished
        reason = FinishReason.DEADLINE if limit_s else FinishReason.CANCELLED
        assert (ended.job_id, ended.finish_reason, ended.error_code) == (job.id, reason, None)
        assert ended.metadata == {"user": "u1"}
        assert (ended.stats.worker, ended.stats.seed) == (at.claimer.name, request.seed)
        assert at.engine.released == [lease]


async def test_the_report_of_a_job_that_could_not_be_prepared_has_its_metadata(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        _, lease, request = await at.claim(metadata={"user": "u1"})
        at.outbox.reject(lease, JobRejected(ErrorCode.INVALID_GRAMMAR, "a wrong grammar"))
        await at.outbox.flush()
        (ended,) = at.engine.finished
        assert (ended.finish_reason, ended.error_code) == (None, "invalid_grammar")
        assert ended.metadata == {"user": "u1"}
        assert ended.stats.queue_ms > 0
        assert ended.stats.seed == request.seed


async def test_a_job_fails_although_its_error_quotes_half_a_surrogate_pair(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, lease, _ = await at.claim()
        half = json.loads('"\\ud83d"')  # as in the arguments of a call that a chat template refuses
        at.outbox.reject(lease, JobRejected(ErrorCode.CHAT_TEMPLATE, f"unknown {half}"))
        await at.outbox.flush()
        with pytest.raises(JobFailed, match=r"unknown \\ud83d"):
            await job.result()


async def test_a_job_that_another_worker_has_taken_is_not_reported(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, lease, _ = await at.claim()
        claim = JobEntry(job.id, lease.stream, lease.entry_id)
        assert isinstance(await at.claimer.claim_scripts.claim_job(claim, "other", LEASE_MS), Attempt)
        await job.cancel()
        await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        assert at.engine.finished == []


async def test_a_job_that_is_requeued_while_it_is_prepared_does_not_reach_the_engine(
    redis_url: str, queue: str
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE) as at:
        _, suspect, _ = await at.claim()
        job, lease, request = await at.claim()
        at.outbox.requeue_all(except_for=suspect)
        unused = cast(Any, None)
        assert not at.outbox.set_prepared(PreparedJob(Job(lease, request, [1], unused, unused), []))
        await at.outbox.flush()
        assert not at.outbox.is_registered(lease)
        assert (await job.status()).state is JobState.QUEUED
