"""The priority of a waiting job can be changed."""

from __future__ import annotations

import json

import pytest
from tests.support.command_line import llamaq
from tests.worker.broker.test_suspects import until, working
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.common.protocol.keys import JobId
from llamaq.producer import AsyncClient, Client, InvalidRequest, JobNotFound, JobState, Priority
from llamaq.producer.testing import LEASE_MS, FakeWorker


async def test_a_job_that_becomes_interactive_is_claimed_before_bulk_jobs(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        first, second = [await client.submit("x", priority="bulk") for _ in range(2)]
        assert await second.set_priority("interactive")
        assert await second.set_priority(Priority.INTERACTIVE), "it has this priority already"
        assert [(job.job_id, job.priority) for job in await client.jobs(priority=Priority.INTERACTIVE)] == [
            (second.id, Priority.INTERACTIVE)
        ]
        assert (await client.queue_depth()).waiting == 2
        attempt = await worker.start_next()
        assert attempt.claim.job_id == second.id
        assert not await second.set_priority("bulk"), "it runs"
        await attempt.answer(["a"])
        assert not await second.set_priority("bulk"), "it has ended"
        assert (await second.result()).text == "a"
        assert (await worker.start_next()).claim.job_id == first.id
        with pytest.raises(JobNotFound):
            await client.job(str(JobId.new(queue))).set_priority("bulk")
        with pytest.raises(InvalidRequest, match="'urgent' is neither"):
            await first.set_priority("urgent")  # type: ignore[arg-type]


async def test_a_worker_drops_a_job_that_it_has_claimed_and_claims_it_with_the_new_priority(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x")
        claim = await worker.claim()
        assert claim is not None
        assert not isinstance(await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS), str)
        assert await job.set_priority("bulk")
        assert await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS) == "done", (
            "the entry is that of before"
        )
        attempt = await worker.start_next()
        assert (attempt.claim.stream.rpartition(":")[2], attempt.number) == ("bulk", 3)
        assert (await job.status()).crashes == 0
        assert await job.cancel()
        assert (await attempt.emit([1], "a")).code == "cancel"


async def test_the_priority_of_a_job_is_that_of_its_stream(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=1) as worker:
        running = await client.submit("runs")
        await until(lambda: running.id in worker.admitted)
        job = await client.submit("x")
        assert await job.set_priority("bulk")
        worker.end(running)
        await until(lambda: job.id in worker.admitted)
        assert worker.admitted[job.id].lease.priority is Priority.BULK


async def test_a_job_for_a_later_time_waits_with_its_new_priority(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("x", delay_s=1000)
        assert await job.set_priority("bulk")
        assert (await job.status()).state is JobState.QUEUED
        assert await client.redis.hget(client.keys.of_job(job.id).job, "priority") == b"bulk"
        assert await client.redis.xlen(client.keys.jobs(queue, 0, Priority.BULK)) == 0


def test_the_priority_is_changed_from_the_command_line(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    with Client(redis_url, queue) as client:
        job = client.submit("x")
        assert llamaq("priority", job.id, "bulk") == "the priority is bulk\n"
        assert client.jobs(priority=Priority.BULK)[0].job_id == job.id
        changed = json.loads(llamaq("priority", job.id, "interactive", "--json"))
        assert changed == {"job_id": job.id, "priority": "interactive", "changed": True}
        assert job.cancel()
    refused = CliRunner().invoke(build_app("priority"), ["priority", job.id, "bulk"])
    assert (refused.exit_code, "runs or has ended" in refused.stderr) == (1, True)
