"""A preempted job waits: its state, its entry, its deadlines and its end are those of a job without a slot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.support.outbox_rig import OutboxRig, working
from tests.worker.broker.test_suspects import until, until_true
from tests.worker.broker.test_suspects import working as full_worker

from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.script_types import Attempt, JobEntry
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, AsyncJob, QueueFull
from llamaq.producer.streaming.job_state import RUNNING_GRACE_MS
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import intake as intake_module
from llamaq.worker.broker import worker_scripts as worker_scripts_module
from llamaq.worker.core.job import Job, PreparedJob
from llamaq.worker.core.outputs import JobEnded, NewToken, SlotAcquired, SlotLost
from llamaq.worker.engine_loop.output_mailbox import Message


async def put(at: OutboxRig, *messages: Message) -> None:
    """Deliver messages of the engine thread, and flush."""
    at.outputs.put(messages)
    await asyncio.sleep(0)
    await at.outbox.flush()


async def state_of(at: OutboxRig, job: AsyncJob) -> tuple[JobState, int, int, bytes]:
    """Return the state of the only job, the numbers of waiting and running jobs, and the consumer of its entry."""
    depth = await at.client.queue_depth()
    stream = at.client.keys.of_job(job.id).interactive
    pending: Any = await at.client.redis.xpending_range(stream, GROUP, "-", "+", 10)
    return (await job.status()).state, depth.waiting, depth.running, pending[0]["consumer"]


async def test_a_preempted_job_waits_until_it_has_a_slot_again(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, lease_s=1.0) as at:
        job, running = await at.begin()
        has_slot = (JobState.RUNNING, 0, 1, at.claimer.name.encode())
        assert await state_of(at, job) == has_slot
        started_ms = (await job.status()).started_ms
        for _ in range(2):
            await put(at, NewToken(running, 0, "a", 0.0), SlotLost(running))
            assert await state_of(at, job) == (JobState.QUEUED, 1, 0, b"waiting")
            await put(at, SlotLost(running))
            assert await state_of(at, job) == (JobState.QUEUED, 1, 0, b"waiting"), "the next flush changes nothing"
            assert [one.job_id for one in await at.client.jobs(state=JobState.QUEUED)] == [job.id]
            await put(at, SlotAcquired(running))
            assert await state_of(at, job) == has_slot
        assert (await job.status()).started_ms == started_ms
        assert [type(event) for event in await at.events(job)].count(Started) == 1
        await put(at, SlotLost(running))
        await at.client.redis.hset(at.client.keys.config(queue, 0), "max_queue", "1")
        with pytest.raises(QueueFull):
            await at.client.submit("one more")


async def test_an_attempt_that_had_its_slot_between_two_flushes_has_started_and_waits(
    redis_url: str, queue: str
) -> None:
    async with working(redis_url, queue) as at:
        job, lease, request = await at.claim()
        unused: Any = None
        running = Job(lease, request, [1], sampler=unused, detokenizer=unused)
        assert at.outbox.set_prepared(PreparedJob(running, []))
        await put(at, SlotAcquired(running), NewToken(running, 7, "h", 0.0), SlotLost(running))
        assert await state_of(at, job) == (JobState.QUEUED, 1, 0, b"waiting")
        assert [event.type for event in await at.events(job)] == ["started", "tokens"]
        await put(at, ended(running, FinishReason.LENGTH, 1))
        assert (await job.result()).tokens == (7,)


def ended(job: Job, reason: FinishReason, n_tokens: int) -> JobEnded:
    return JobEnded(job, JobStats(generated_tokens=n_tokens), reason=reason, text="<withheld>")


async def test_a_job_waits_only_when_all_its_tokens_are_stored(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, streams=False) as at:  # without checkpoints
        job, running = await at.begin()
        keys = at.client.keys.of_job(job.id)
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        assert await at.stored(job) == []
        await put(at, SlotLost(running))
        assert await at.stored(job) == [0, 1, 2]
        assert (await job.status()).state is JobState.QUEUED
        await put(at, SlotAcquired(running))
        await at.put(running, 3)
        await at.client.redis.delete(keys.events)  # a failover to a replica that has not received the last writes
        await at.client.redis.hset(keys.job, "generated", "0")
        await put(at, SlotLost(running))
        assert (await at.stored(job), (await job.status()).state) == ([], JobState.RUNNING)
        await at.outbox.flush()
        assert (await at.stored(job), (await job.status()).state) == ([0, 1, 2, 3], JobState.QUEUED)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_cancelled_preempted_job_keeps_its_tokens_its_withheld_text_and_its_stats(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, streams=streams) as at:
        job, running = await at.begin()
        await put(at, NewToken(running, 0, "a", 0.0), NewToken(running, 1, "b", 0.0), SlotLost(running))
        assert (await job.status()).state is JobState.QUEUED
        assert await at.client.purge() == (job.id,), "it waits, so it is purged"
        assert (await job.status()).cancel_requested
        await at.outbox.flush()
        assert at.engine.cancelled == [job.id]
        await put(at, ended(running, FinishReason.CANCELLED, 2))
        result = await job.result()
        assert (result.text, result.tokens, result.finish_reason) == ("ab<withheld>", (0, 1), FinishReason.CANCELLED)
        assert "".join([chunk.text async for chunk in job.stream()]) == result.text
        assert await at.client.redis.hexists(at.client.keys.of_job(job.id).job, "output")
        assert at.outbox.n_jobs == 0


async def test_the_worker_ends_a_preempted_job_at_its_deadline_and_another_client_later(
    redis_url: str, queue: str
) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        keys = at.client.keys.of_job(job.id)
        scripts = JobScripts(at.client.redis, at.client.keys)
        await put(at, NewToken(running, 0, "a", 0.0), SlotLost(running))
        seconds, _ = await at.client.redis.time()
        passed: dict[str, int] = {"queue_deadline_ms": 1, "deadline_ms": (seconds + 1000) * 1000}
        await at.client.redis.hset(keys.job, mapping=passed)  # type: ignore[arg-type]
        assert await scripts.expire(job.id) == "none", "its queue_timeout_s counts up to its first slot"
        deadline_ms = await server_time_ms(at.client.redis)
        await at.client.redis.hset(keys.job, "deadline_ms", str(deadline_ms))
        while await scripts.expire(job.id) == "none":
            pass
        finished_ms = (await job.status()).finished_ms or 0
        assert finished_ms >= deadline_ms + RUNNING_GRACE_MS, "the worker has time to end it, with its withheld text"
        assert (await job.result()).tokens == (0,)


async def test_a_preempted_job_continues_in_a_worker_with_a_free_slot(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_scripts_module, "MOVE_AFTER_S", 0.05)
    monkeypatch.setattr(intake_module, "SEARCH_EVERY_S", 0.05)
    async with AsyncClient(redis_url, queue) as client, full_worker(redis_url, queue, n_slots=1) as busy:
        job = await client.submit("bulk", priority="bulk")
        await until(lambda: job.id in busy.admitted)
        busy.generate(job)
        busy.outputs.put([SlotLost(busy.admitted[job.id])])
        await until_true(partial(has_state, job, JobState.QUEUED))
        async with full_worker(redis_url, queue, "w2", n_slots=1) as idle:
            await until(lambda: job.id in idle.admitted)
            assert idle.admitted[job.id].generated_before == [65]
            await until(lambda: not busy.admitted)
            await until_true(partial(has_state, job, JobState.RUNNING))
            idle.generate(job, 66)
            idle.end(job)
            assert (await job.result(timeout=20)).tokens == (65, 66)
            assert (await job.status()).crashes == 0


async def has_state(job: AsyncJob, state: JobState) -> bool:
    return (await job.status()).state is state


async def test_a_preempted_job_is_requeued_with_another_priority_or_by_the_supervisor(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", priority="bulk")
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        preempted = replace(attempt.increment(), has_slot=False)
        await worker.scripts.flush([preempted], LEASE_MS, renew=True)
        assert (await client.queue_depth()).waiting == 1, "the renewed entry is that of a waiting job"
        assert await job.set_priority(Priority.INTERACTIVE)
        assert (await attempt.emit([2], "b")).code == "lost"
        again = await worker.start_next()
        assert (again.claim.stream.rpartition(":")[2], again.tokens) == ("interactive", [1])
        preempted = replace(again.increment(), has_slot=False)
        await worker.scripts.flush([preempted], LEASE_MS, renew=False)
        claim = JobEntry(job.id, again.claim.stream, again.claim.entry_id)
        moved = await worker.claim_scripts.claim_job(replace(claim, from_attempt=again.number), "w2", LEASE_MS)
        assert isinstance(moved, Attempt)
        assert moved.generated == 1
        assert moved.queue_ms is not None, "the wait for its first slot has ended"
        assert await job.cancel(), "the new attempt had no slot, so the job ends at once"
        assert (await job.result()).tokens == (1,)
