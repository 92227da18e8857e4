"""`--exit-when-empty`: a queue is empty when no worker has a job of it, none waits, and none is due soon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.job_claims import worker_queue
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.keys import Keys
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.empty_queue_watch import EmptyQueueWatch
from llamaq.worker.broker.worker_queue import WorkerQueue

SOON_S = 30.0


def watch(client: AsyncClient, empty_s: float = SOON_S) -> EmptyQueueWatch:
    return EmptyQueueWatch(worker_queue(client), empty_s, on_empty=lambda: None)


async def test_a_waiting_and_a_running_job_keep_a_queue_from_being_empty(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        assert await watch(client).is_empty()
        job = await client.submit("x")
        assert not await watch(client).is_empty()
        attempt = await worker.start_next()
        assert (await client.queue_depth()).running == 1
        assert not await watch(client).is_empty()
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        assert (await client.queue_depth()).waiting == 1
        assert not await watch(client).is_empty()
        await job.cancel()
        assert await watch(client).is_empty()


@pytest.mark.parametrize(("delay_s", "is_empty"), [(SOON_S - 10, False), (SOON_S + 1000, True)])
async def test_only_a_delayed_job_that_is_due_soon_counts(
    redis_url: str, queue: str, delay_s: float, is_empty: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.submit("x", delay_s=delay_s)
        assert await watch(client).is_empty() is is_empty


async def test_the_queue_must_be_empty_at_every_look_for_the_whole_time() -> None:
    answers: Iterator[bool | Exception] = iter([True, False, True, RedisConnectionError("away"), *[True] * 100])
    n_looks = 0
    ended: list[int] = []

    class Scripted(EmptyQueueWatch):
        async def is_empty(self) -> bool:
            nonlocal n_looks
            n_looks += 1
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    unused = WorkerQueue(Redis(), Keys(), "q", 1)
    scripted = Scripted(unused, 0.15, on_empty=lambda: ended.append(n_looks))
    await asyncio.wait_for(scripted.run(), timeout=60)
    assert len(ended) == 1
    assert ended[0] > 5  # neither the looks before the job nor those before the outage count
