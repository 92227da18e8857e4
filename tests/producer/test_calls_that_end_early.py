"""Calls that end early: their jobs are cancelled, unless another caller may need them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tests.producer.conftest import AfterTimeout

from llamaq.producer import (
    AsyncClient,
    Chunk,
    FinishReason,
    JobState,
    NoWorker,
    QueueDepth,
    ResultTimeout,
    auto_cancelled_jobs,
)
from llamaq.producer.testing import FakeAttempt, FakeWorker

NEVER = "socket_timeout=600"
"""A parameter of a URL: no command that is in flight times out when the clock of the event loop moves."""


@pytest.fixture(autouse=True)
def long_last_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call whose timeout is over search for a worker longer than a busy machine needs. The default is 0.1 s."""
    monkeypatch.setattr(auto_cancelled_jobs, "LAST_WAIT_S", 10.0)


async def until_cancelled(attempt: FakeAttempt) -> None:
    """Act as a worker: flush until the reply requests cancellation, then finish the attempt as cancelled."""
    while (await attempt.emit([], "")).code != "cancel":  # noqa: ASYNC110  # a worker polls too
        await asyncio.sleep(0.01)
    await attempt.finish(FinishReason.CANCELLED)


async def test_generate_raises_no_worker_and_cancels_when_no_worker_serves_the_queue(
    redis_url: str, queue: str, after_timeout: AfterTimeout
) -> None:
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client:
        with pytest.raises(NoWorker, match=queue):
            await after_timeout(client, client.generate("hello", timeout=30))
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)
        stream = await client.stream("hello", timeout=30)
        with pytest.raises(NoWorker, match=queue):
            await after_timeout(client, anext(stream))
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)


async def test_generate_raises_result_timeout_and_cancels_when_the_worker_is_slow(
    redis_url: str, queue: str, after_timeout: AfterTimeout
) -> None:
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        with pytest.raises(ResultTimeout, match="has not finished within 30 s") as caught:
            await after_timeout(client, client.generate("hello", timeout=30))
        assert isinstance(caught.value, TimeoutError)
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)


async def test_the_clients_own_timeout_is_the_default(redis_url: str, queue: str, after_timeout: AfterTimeout) -> None:
    async with AsyncClient(f"{redis_url}?{NEVER}", queue, timeout_s=30.25) as client:
        job = await client.submit("hello")
        with pytest.raises(ResultTimeout, match=r"within 30\.25 s"):
            await after_timeout(client, job.result(), 30.25)
        assert (await job.status()).state is JobState.QUEUED


async def test_a_generate_call_in_a_cancelled_task_cancels_its_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        waiting = asyncio.create_task(client.generate("hello"))
        attempt = await worker.start_next()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until_cancelled(attempt)
        assert (await client.job(attempt.claim.job_id).result()).finish_reason is FinishReason.CANCELLED


async def test_a_task_cancelled_during_the_submit_leaves_no_job_behind(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        for turns in range(12):
            waiting = asyncio.create_task(client.generate("hello"))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    async with AsyncClient(redis_url, queue) as client:
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)


async def test_a_stream_closed_early_cancels_its_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        async with await client.stream("hello") as chunks:
            first = asyncio.ensure_future(anext(chunks))
            attempt = await worker.start_next()
            await attempt.emit([7], "x")
            assert await first == Chunk("x", (7,), 0, 0)
        await until_cancelled(attempt)
        assert await client.job(attempt.claim.job_id).cancel() is False


async def test_a_reader_that_stops_early_does_not_cancel_the_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.emit([7], "x")
        async with aclosing(client.job(job.id).stream()) as chunks:
            assert (await anext(chunks)).text == "x"
        assert (await attempt.emit([8], "y")).code == "ok"


async def test_a_timeout_does_not_cancel_a_job_that_an_idempotency_key_shares(
    redis_url: str, queue: str, after_timeout: AfterTimeout
) -> None:
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello", idempotency_key="k")
        attempt = await worker.start_next()
        with pytest.raises(NoWorker):
            await after_timeout(client, client.generate("hello", idempotency_key="k", timeout=30))
        assert (await attempt.emit([1], "a")).code == "ok"
        await attempt.finish()
        assert (await client.generate("hello", idempotency_key="k")).job_id == job.id
