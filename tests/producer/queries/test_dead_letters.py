"""Dead letters through the client: list, show, retry and purge."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.dead_letters import add_dead_job, add_dead_letters, add_garbage_entry

from llamaq.common.protocol.keys import JobId
from llamaq.producer import (
    AsyncClient,
    Client,
    DeadLetterNotFound,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    JobState,
    QueueFull,
)
from llamaq.producer.testing import FakeWorker


async def test_dead_letters_are_listed_newest_first_with_their_reason(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        assert await client.dead_letters() == ()
        first = await add_dead_job(client, worker)
        second = await add_dead_job(client, worker)
        await add_garbage_entry(worker)
        garbage, *jobs = await client.dead_letters()
        assert [letter.id for letter in jobs] == [letter.job_id for letter in jobs] == [second, first]
        assert {letter.workers for letter in jobs} == {("a", "b", "c")}
        assert garbage.job_id is None
        assert garbage.id == f"{queue}.0.{garbage.entry}"
        assert "not a job id" in garbage.reason
        assert garbage.dead_ms >= jobs[0].dead_ms >= jobs[1].dead_ms


async def test_a_dead_letter_shows_the_request_and_the_generated_output(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job_id = await add_dead_job(client, worker, "what kills", seed=5, metadata={"user": "u"})
        letter = await client.dead_letter(job_id)
        assert letter.request is not None
        assert (letter.request.prompt, letter.request.seed, letter.request.metadata) == ("what kills", 5, {"user": "u"})
        assert (letter.text, letter.tokens) == ("two tokens", (7, 8))
        await add_garbage_entry(worker)
        (garbage, _) = await client.dead_letters()
        shown = await client.dead_letter(garbage.id)
        assert shown.request is None
        assert "nonsense" in shown.held


async def test_retry_submits_a_new_job_with_the_same_request_and_removes_the_letter(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        options: dict[str, Any] = {"seed": 5, "metadata": {"user": "u"}, "priority": "bulk", "max_tokens": 9}
        old = await add_dead_job(client, worker, idempotency_key="key", **options)
        job = await client.retry_dead_letter(old)
        assert job.id != old
        attempt = await worker.start_next()
        assert attempt.claim.job_id == job.id
        request = attempt.request
        assert (request.prompt, request.seed, request.metadata) == ("poison", 5, {"user": "u"})
        assert (request.priority, request.max_tokens, request.idempotency_key) == ("bulk", 9, None)
        assert attempt.stored == 0, "the new job starts from its prompt"
        await attempt.answer(["fine"])
        assert (await job.result(timeout=60)).text == "fine"

        assert await client.dead_letters() == ()
        with pytest.raises(DeadLetterNotFound):
            await client.retry_dead_letter(old)
        with pytest.raises(JobFailed):
            await client.job(old).result(timeout=60)
        assert 0 < await client.redis.pttl(client.keys.of_job(old).job) <= 60_000
        assert (await client.submit("poison", idempotency_key="key", **options)).id == old, (
            "the key stays with the old job"
        )


async def test_concurrent_retries_submit_one_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        old = await add_dead_job(client, worker)
        outcomes = await asyncio.gather(*(client.retry_dead_letter(old) for _ in range(20)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)} <= {DeadLetterNotFound}
        assert len({job.id for job in outcomes if not isinstance(job, BaseException)}) == 1
        assert (await client.queue_depth()).waiting == 1


async def test_a_letter_that_cannot_be_retried_raises_an_error_and_remains(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        old = await add_dead_job(client, worker)
        await worker.redis.hset(client.keys.config(queue, 0), "max_queue", "1")
        blocking_job = await client.submit("blocking")
        with pytest.raises(QueueFull):
            await client.retry_dead_letter(old)
        await blocking_job.cancel()
        await worker.redis.delete(client.keys.of_job(old).job)
        with pytest.raises(JobNotFound):
            await client.retry_dead_letter(old)
        assert (await client.dead_letter(old)).request is None
        await add_garbage_entry(worker)
        garbage, _ = await client.dead_letters()
        with pytest.raises(InvalidRequest, match="is not a job"):
            await client.retry_dead_letter(garbage.id)
        assert len(await client.dead_letters()) == 2


@pytest.mark.parametrize("field", ["ttl_ms", "finished_ms"])
async def test_a_dead_letter_whose_job_has_a_damaged_time_can_be_purged(redis_url: str, queue: str, field: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        job_id = await add_dead_job(client, worker)
        await client.redis.hset(client.keys.of_job(job_id).job, field, "x")
        (letter,) = await client.dead_letters()
        await client.purge_dead_letter(letter.id)
        assert await client.dead_letters() == ()
        assert await client.redis.pttl(client.keys.of_job(job_id).job) < 1000


async def test_purge_removes_the_letter_and_its_job_expires_like_any_other(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        old = await add_dead_job(client, worker)
        await add_garbage_entry(worker)
        for letter in await client.dead_letters():
            await client.purge_dead_letter(letter.id)
            with pytest.raises(DeadLetterNotFound, match="retried or purged"):
                await client.purge_dead_letter(letter.id)
        assert await client.dead_letters() == ()
        keys = client.keys.of_job(old)
        assert [0 < await client.redis.pttl(key) <= 60_000 for key in (keys.job, keys.events)] == [True, True]


async def test_an_unknown_id_and_a_malformed_id_are_different_errors(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        for letter_id in (str(JobId.new(queue)), f"{queue}.0.1-1"):
            with pytest.raises(DeadLetterNotFound):
                await client.dead_letter(letter_id)
        for letter_id in ("nonsense", f"{queue}.0.+", f"{queue}.0.1-1 ", ""):
            with pytest.raises(InvalidRequest):
                await client.dead_letter(letter_id)


def test_the_blocking_client_lists_shows_retries_and_purges_dead_letters(redis_url: str, queue: str) -> None:
    job_id, garbage = asyncio.run(add_dead_letters(redis_url, queue))
    with Client(redis_url, queue) as client:
        assert [letter.id for letter in client.dead_letters()] == [garbage, job_id]
        assert client.dead_letter(job_id).text == "two tokens"
        job = client.retry_dead_letter(job_id)
        assert job.is_new
        assert job.status().state is JobState.QUEUED
        client.purge_dead_letter(garbage)
        assert client.dead_letters() == ()
