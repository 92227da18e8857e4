"""A client that waits for a job ends it at its deadlines, even if no worker is alive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llamaq.producer import AsyncClient, FinishReason, JobState
from llamaq.producer.streaming import deadline_watch
from llamaq.producer.streaming.job_state import RUNNING_GRACE_MS, read_state
from llamaq.producer.testing import FakeWorker


@pytest.mark.parametrize(
    "options", [{"queue_timeout_s": 0.3}, {"deadline_s": 0.3}, {"queue_timeout_s": 9, "deadline_s": 0.3}]
)
async def test_a_job_ends_at_its_deadline_without_any_worker(
    redis_url: str, queue: str, options: dict[str, Any]
) -> None:
    async with AsyncClient(redis_url, queue) as client, AsyncClient(redis_url, queue) as other:
        job = await client.submit("hello", **options)
        readers = [job.result(timeout=20), other.job(job.id).result(timeout=20)]
        readers.append(client.generate("hello", timeout=20, **options))
        chunks = asyncio.create_task(read_all(other, job.id))
        for result in await asyncio.gather(*readers):
            assert (result.finish_reason, result.tokens) == (FinishReason.DEADLINE, ())
        assert await chunks == []
        assert (await client.queue_depth()).waiting == 0


async def read_all(client: AsyncClient, job_id: str) -> list[str]:
    return [chunk.text async for chunk in client.job(job_id).stream(timeout=20)]


async def test_a_job_that_has_started_outlives_its_queue_timeout(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client looks at the job after 0.3 s. On the clock of Redis the job has 1000 s to start, until the test says
    # that they have passed.
    monkeypatch.setattr(deadline_watch, "LATE_S", -999.7)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        waiting = asyncio.create_task(client.generate("hello", queue_timeout_s=1000))
        attempt = await worker.start_next()
        await attempt.emit([], "")  # the first flush starts the job
        await client.redis.hset(client.keys.of_job(attempt.claim.job_id).job, "queue_deadline_ms", "1")
        await asyncio.sleep(1.0)  # the client looks at the job after its queue timeout
        assert (await client.job(attempt.claim.job_id).status()).state is JobState.RUNNING
        await attempt.answer(["a"])
        assert (await waiting).text == "a"


async def test_a_client_tries_again_when_redis_ends_a_job_later_than_expected(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline_watch, "RETRY_S", 0.05)
    monkeypatch.setattr(deadline_watch, "LATE_S", -0.5)  # like a clock of this host that is ahead
    async with AsyncClient(redis_url, queue) as client:
        result = await client.generate("hello", queue_timeout_s=0.6, timeout=20)
        assert result.finish_reason is FinishReason.DEADLINE


@pytest.mark.parametrize(
    ("values", "due_ms"),
    [
        ([b"queued", b"0", None, b"0", None, None, b"1", None], None),
        ([b"queued", b"0", None, b"1000", b"0", None, b"1", None], 1000),
        ([b"queued", b"0", None, b"1000", b"700", None, b"1", None], 700),
        ([b"queued", b"3", b"500", b"1000", b"2000", None, b"2", b"1"], 2000),  # it has had a slot
        ([b"queued", b"3", b"500", b"1000", b"2000", None, b"1", b"1"], 2000 + RUNNING_GRACE_MS),  # it was preempted
        ([b"queued", b"0", None, b"1000", b"2000", b"600", b"1", None], 600),  # it is not due before
        ([b"running", b"3", b"500", b"1000", b"2000", None, b"1", None], 2000 + RUNNING_GRACE_MS),
        ([b"running", b"3", b"500", b"1000", b"0", None, b"1", None], None),
        ([b"finished", b"3", b"500", b"1000", b"2000", None, b"1", None], None),
        ([None] * 8, None),
    ],
)
def test_the_deadline_of_a_job_depends_on_its_state(values: list[bytes | None], due_ms: int | None) -> None:
    state = read_state(values)
    assert (state.status, state.n_tokens, state.due_ms) == (values[0], int(values[1] or 0), due_ms)
