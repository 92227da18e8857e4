"""A job whose cancel was accepted ends when its worker stops or dies, even if no other worker runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.fake_redis import url_of_each_server
from tests.support.job_claims import worker_queue
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.script_types import StoredEnd
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts

redis_url = url_of_each_server


async def start_and_cancel(
    client: AsyncClient, worker: FakeWorker, *, is_preempted: bool = False
) -> tuple[AsyncJob, FakeAttempt]:
    """Start a job, generate a token of it, and request its cancel."""
    job = await client.submit("hello")
    attempt = await worker.start_next()
    await attempt.emit([1], "a")
    if is_preempted:
        await worker.scripts.flush([replace(attempt.increment(), has_slot=False)], LEASE_MS, renew=False)
    assert await JobScripts(worker.redis, worker.keys).cancel(job.id) == "requested"
    return job, attempt


async def assert_cancelled(client: AsyncClient, job: AsyncJob) -> None:
    status = await job.status()
    assert (status.state, status.finish_reason, status.crashes) == (JobState.FINISHED, FinishReason.CANCELLED, 0)
    result = await client.job(job.id).result(timeout=60)
    assert (result.text, result.finish_reason) == ("a", FinishReason.CANCELLED)
    depth = await client.queue_depth()
    assert (depth.waiting, depth.running) == (0, 0)


@pytest.mark.parametrize("is_preempted", [False, True])
@pytest.mark.parametrize("crashed", [False, True])
async def test_a_cancelled_job_ends_when_its_worker_requeues_it(
    redis_url: str, queue: str, crashed: bool, is_preempted: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start_and_cancel(client, worker, is_preempted=is_preempted)
        for _ in range(2):
            assert not await worker_scripts(worker).requeue(attempt.claim, attempt.number, crashed=crashed)
        await assert_cancelled(client, job)
        end = await worker_scripts(worker).read_end(job.id, attempt.number)
        assert end == StoredEnd(FinishReason.CANCELLED, None), "the worker reports the end"


@pytest.mark.parametrize("is_preempted", [False, True])
async def test_a_cancelled_job_ends_when_its_dead_worker_is_released(
    redis_url: str, queue: str, is_preempted: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, _ = await start_and_cancel(client, worker, is_preempted=is_preempted)
        upkeep = UpkeepScripts(worker_queue(worker))
        assert await upkeep.release_worker(0, worker.name) == 1
        assert await upkeep.release_worker(0, worker.name) == 0
        await assert_cancelled(client, job)


async def test_the_priority_of_a_cancelled_job_does_not_change(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start_and_cancel(client, worker, is_preempted=True)
        scripts = JobScripts(worker.redis, worker.keys)
        assert await scripts.set_priority(job.id, Priority.BULK) == "running"
        assert (await attempt.emit([], "")).code == "cancel", "its worker has it still"
