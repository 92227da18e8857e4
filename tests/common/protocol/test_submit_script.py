"""submit.lua puts each job into the queue once, and bounds the number of waiting jobs.

Every test runs on a real server and on the fake server of `tests.support.fake_redis`.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from tests.support.fake_redis import url_of_each_server
from tests.support.started_jobs import start

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.script_types import Submission, SubmitQueueFull, Submitted
from llamaq.producer import AsyncClient, IdempotencyConflict
from llamaq.producer.testing import FakeWorker

redis_url = url_of_each_server


def submission(queue: str, **options: Any) -> Submission:
    """Return a new job with these options."""
    request = codec.build_request(options)
    payload = codec.encode_request(request, 1024)
    return Submission(JobId.new(queue), request, payload, result_ttl_s=60, event_ttl_s=0, partitions=0)


async def test_the_same_submit_sent_twice_puts_one_job_into_the_queue(redis_url: str, queue: str) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        job = submission(queue, prompt="hello")
        job_id = str(job.job_id)
        for _ in range(2):
            outcome = await JobScripts(worker.redis, worker.keys).submit(job)
            assert outcome == Submitted(job_id, existing=False)
        assert await worker.redis.xlen(worker.keys.of_job(job_id).interactive) == 1


async def test_fifty_submits_with_one_idempotency_key_make_one_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, partitions=4) as client:
        jobs = await asyncio.gather(*(client.submit("hello", idempotency_key="order 7") for _ in range(50)))
        assert len({job.id for job in jobs}) == 1
        assert [job.is_new for job in jobs].count(True) == 1
        assert (await client.queue_depth()).waiting == 1
        other = await client.submit("hello", idempotency_key="order 8")
        assert other.is_new
        assert other.id != jobs[0].id


async def test_an_idempotency_key_can_be_used_again_after_the_result_has_expired(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=0.05) as client:
        first = await client.submit("hello", idempotency_key="key")
        await first.cancel()
        key = client.keys.idempotency(queue, 0, "key")
        while await client.redis.exists(key, client.keys.of_job(first.id).job):  # noqa: ASYNC110  # Redis expires it
            await asyncio.sleep(0.01)
        second = await client.submit("hello", idempotency_key="key")
        assert second.is_new


async def test_an_idempotency_key_can_be_used_again_after_its_job_was_deleted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        first = await client.submit("hello", idempotency_key="key")
        await client.redis.delete(client.keys.of_job(first.id).job)
        second = await client.submit("another request", idempotency_key="key")
        assert second.is_new
        assert (await client.submit("another request", idempotency_key="key")).id == second.id


async def test_an_idempotency_key_with_another_request_is_an_error_that_names_the_job(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        options: dict[str, Any] = {"idempotency_key": "key", "logit_bias": {7: 1.5, 5: -1}}
        first = await client.submit("hello", **options)
        same: dict[str, Any] = {"seed": 5, "metadata": {"try": 2}, "priority": "bulk", "stream": False, "timeout_s": 9}
        assert (await client.submit("hello", **options, **same)).id == first.id
        for prompt, changed in (("other", {}), ("hello", {"max_tokens": 3}), ("hello", {"logit_bias": {7: 1.5}})):
            with pytest.raises(IdempotencyConflict, match=first.id) as caught:
                await client.submit(prompt, **{**options, **changed})
            assert pickle.loads(pickle.dumps(caught.value)).job_id == first.id
        await client.submit(tokens=[1, 2], idempotency_key="tokens")
        with pytest.raises(IdempotencyConflict):
            await client.submit(tokens=[1, 3], idempotency_key="tokens")
        assert (await client.queue_depth()).waiting == 2


async def test_concurrent_submits_of_both_priorities_do_not_exceed_max_queue(redis_url: str, queue: str) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        await worker.redis.hset(worker.keys.config(queue, 0), "max_queue", "5")

        async def submit(number: int) -> object:
            job = submission(queue, prompt="x", priority=("bulk", "interactive")[number % 2])
            return await JobScripts(worker.redis, worker.keys).submit(job)

        outcomes = await asyncio.gather(*(submit(number) for number in range(40)))
        assert sum(isinstance(outcome, Submitted) for outcome in outcomes) == 5
        assert {outcome for outcome in outcomes if isinstance(outcome, SubmitQueueFull)} == {
            SubmitQueueFull(depth=5, max_queue=5)
        }


async def test_jobs_that_run_do_not_count_for_max_queue(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.redis.hset(worker.keys.config(queue, 0), "max_queue", "1")
        await start(client, worker)
        job = await client.submit("fits")
        assert (await job.status()).state is JobState.QUEUED
