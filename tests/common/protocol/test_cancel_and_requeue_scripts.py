"""The scripts that cancel and requeue jobs: what they do in each state of a job.

Every test runs on a real server and on the fake server of `tests.support.fake_redis`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support.fake_redis import url_of_each_server
from tests.support.reclaims import reclaim
from tests.support.started_jobs import field, start
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import (
    Attempt,
)
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker

redis_url = url_of_each_server


# cancel


async def test_cancelling_a_waiting_job_ends_it_and_deletes_its_entry(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello", priority="bulk")
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "cancelled"
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "done"
        assert (await job.status()).finish_reason is FinishReason.CANCELLED
        assert (await client.queue_depth()).waiting == 0


async def test_cancelling_a_claimed_job_before_its_start_ends_it(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "cancelled"
        assert await worker.claim_scripts.claim_job(claim, "fake", LEASE_MS) == "done"
        assert (await client.queue_depth()).running == 0


async def test_the_flush_of_a_cancelled_job_returns_cancel(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "requested"
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "requested"
        assert (await attempt.emit([1], "a")).code == "cancel"
        assert (await job.status()).cancel_requested
        await attempt.finish(FinishReason.CANCELLED)
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "done"


@pytest.mark.slow
@pytest.mark.parametrize("only_waiting", [False, True])
async def test_a_cancelled_job_whose_worker_lost_its_lease_ends_at_once(
    redis_url: str, queue: str, only_waiting: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await attempt.emit([1], "a")
        await worker.scripts.flush([attempt.increment()], 1, renew=True)  # the lease expires after 1 ms
        while not (await client.queue_depth()).waiting:  # noqa: ASYNC110 -- Redis tells nothing when a lease expires
            await asyncio.sleep(0.05)
        assert await JobScripts(worker.redis, worker.keys).cancel(job.id, only_waiting=only_waiting) == "cancelled"
        result = await job.result()
        assert (result.text, result.tokens, result.finish_reason) == ("a", (1,), FinishReason.CANCELLED)
        assert (await attempt.emit([2], "b")).code == "lost"
        assert not await attempt.finish()


async def test_a_job_that_is_cancelled_after_its_worker_died_ends_at_the_next_start(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await attempt.emit([1], "a")
        await job.cancel()
        assert await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS) == "ended"
        result = await client.job(job.id).result(timeout=60)
        assert (result.text, result.tokens, result.finish_reason) == ("a", (1,), FinishReason.CANCELLED)


async def emit_withholding(attempt: FakeAttempt, tokens: list[int], text: str, withheld: str) -> None:
    """Store tokens with this text and with text that is withheld after them."""
    increment = attempt.increment(tokens, text)
    event = b""
    if withheld:
        event = codec.encode_tokens(attempt.stored + len(tokens), (), len(attempt.text + text), withheld)
    worker = attempt.worker
    (reply,) = await worker.scripts.flush([replace(increment, withheld=event)], LEASE_MS, renew=False)
    attempt.stored, attempt.text = reply.stored, attempt.text + text


@pytest.mark.parametrize(
    ("withheld", "expected"),
    [(["th", ""], "aé"), (["", "th"], "aéth"), (["th", "\N{REPLACEMENT CHARACTER}"], "aé\ufffd")],
)
async def test_a_job_that_ends_between_two_attempts_has_the_text_that_was_withheld(
    redis_url: str, queue: str, withheld: list[str], expected: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await emit_withholding(attempt, [1, 2], "a", withheld[0])
        await emit_withholding(attempt, [3], "é", withheld[1])
        await job.cancel()
        assert await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS) == "ended"
        assert "".join([chunk.text async for chunk in job.stream()]) == expected
        result = await client.job(job.id).result(timeout=60)
        assert (result.text, result.tokens, result.finish_reason) == (expected, (1, 2, 3), FinishReason.CANCELLED)
        assert await worker.redis.hget(worker.keys.of_job(job.id).job, "withheld") is None


async def test_withheld_text_of_other_tokens_is_not_emitted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await emit_withholding(attempt, [1, 2], "a", "th")
        await worker.redis.hset(worker.keys.of_job(job.id).job, "generated", "1")
        await job.cancel()
        assert await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS) == "ended"
        assert (await client.job(job.id).result(timeout=60)).text == "a"


async def test_cancelling_a_missing_job_returns_gone(redis_url: str, queue: str) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        assert await JobScripts(worker.redis, worker.keys).cancel(str(JobId.new(queue))) == "gone"


# requeue


@pytest.mark.parametrize("was_claimed", [True, False])
async def test_another_worker_can_claim_a_requeued_job_at_once(redis_url: str, queue: str, was_claimed: bool) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        if was_claimed:
            assert isinstance(await worker.claim_scripts.claim_job(claim, "fake", LEASE_MS), Attempt)
        assert await worker_scripts(worker).requeue(claim, 1 if was_claimed else None) is True
        assert (await job.status()).state is JobState.QUEUED
        reclaimed = await reclaim(worker, claim.stream, 10, LEASE_MS, trusted_until_ms=0)
        assert [(entry, found[b"id"]) for entry, found, _ in reclaimed] == [(claim.entry_id.encode(), job.id.encode())]
        again = await worker.claim_scripts.claim_job(claim, "other", LEASE_MS)
        assert isinstance(again, Attempt)
        assert again.number == (3 if was_claimed else 1)


async def test_after_a_requeue_the_old_worker_can_neither_write_nor_requeue_again(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        assert await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        assert not await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        assert (await attempt.emit([1], "a")).code == "lost"
        assert await field(worker, job.id, "attempt") == b"2"
