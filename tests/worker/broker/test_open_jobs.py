"""A worker leaves out the searches for jobs while its queue has no open jobs, and makes them again with a new job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.job_claims import worker_queue
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_other_model import model

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.abandoned_jobs import AbandonedJobs
from llamaq.worker.broker.deadline_sweep import DeadlineSweep
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.open_jobs import OpenJobs
from llamaq.worker.broker.stream_scripts import StreamScripts
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.broker.worker_scripts import WorkerScripts


def test_a_queue_may_have_open_jobs_until_each_partition_was_empty_and_again_after_a_new_job() -> None:
    jobs = OpenJobs(2)
    assert jobs.may_exist()
    jobs.note(0, 0)
    assert (jobs.may_exist(), jobs.may_exist_in(0), jobs.may_exist_in(1)) == (True, False, True)
    jobs.note(1, 0)
    assert not jobs.may_exist()
    jobs.note(0, 3)
    assert (jobs.may_exist(), jobs.may_exist_in(0), jobs.may_exist_in(1)) == (True, True, False)
    jobs.note(0, 0)
    jobs.forget()
    assert (jobs.may_exist(), jobs.may_exist_in(0), jobs.may_exist_in(1)) == (True, True, True)


async def test_a_search_for_deadlines_counts_the_jobs_that_have_not_ended(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        scripts = JobScripts(client.redis, client.keys)

        async def n_open() -> int:
            return (await scripts.due_jobs(queue, 0, 10)).n_open

        assert await n_open() == 0
        await client.submit("runs")
        attempt = await worker.start_next()
        waiting = await client.submit("waits", priority="bulk")
        delayed = await client.submit("later", delay_s=1000)
        of_tenant = await client.submit("waits for its turn", tenant="acme")
        assert await n_open() == 4
        await attempt.finish()
        for n_left, job in ((2, waiting), (1, delayed), (0, of_tenant)):
            await job.cancel()
            assert await n_open() == n_left
        await client.redis.delete(client.keys.jobs(queue, 0, Priority.BULK))
        await client.redis.set(client.keys.jobs(queue, 0, Priority.BULK), "overwritten")
        assert await n_open() == 1, "it is not known whether there are jobs"


@dataclass
class Searches:
    """The searches of a worker, whose calls of scripts are counted."""

    client: AsyncClient
    claims: JobClaims
    sweep: DeadlineSweep
    abandoned: AbandonedJobs
    counted: list[str]

    async def all(self) -> list[str]:
        """Make all searches but that for deadlines, and return those that called Redis."""
        self.counted.clear()
        await self.claims.reclaim(1)
        await self.claims.movable(1)
        await self.abandoned.check(0)
        return list(self.counted)


ALL = ["reclaim", "reclaim", "movable_jobs", "end_abandoned"]
"""There is one call of `reclaim` for each priority."""


@asynccontextmanager
async def searching(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Searches]:
    counted: list[str] = []

    def count(scripts: type, name: str) -> None:
        call = getattr(scripts, name)

        async def recorded(*args: Any, **options: Any) -> Any:
            counted.append(name)
            return await call(*args, **options)

        monkeypatch.setattr(scripts, name, recorded)

    count(StreamScripts, "reclaim")
    count(WorkerScripts, "movable_jobs")
    count(UpkeepScripts, "end_abandoned")
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        model(worker, "any") as claims,
    ):
        served = worker_queue(worker)
        yield Searches(
            client,
            claims,
            DeadlineSweep(served, on_reply=claims.observe),
            AbandonedJobs(served, disconnect_s=5, may_have_jobs=claims.may_have_jobs),
            counted,
        )


async def test_without_open_jobs_nothing_but_the_deadlines_is_searched(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with searching(redis_url, queue, monkeypatch) as searches:
        assert await searches.all() == ALL, "the jobs are not counted yet"
        await searches.sweep.handle_due(0)
        assert await searches.all() == []
        job = await searches.client.submit("waits", delay_s=1000)
        assert await searches.all() == []
        await searches.sweep.handle_due(0)
        assert await searches.all() == ALL
        await job.cancel()
        await searches.sweep.handle_due(0)
        assert await searches.all() == []


async def test_a_new_entry_that_ends_a_wait_starts_the_searches_again(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        searching(redis_url, queue, monkeypatch) as searches,
        FakeWorker(redis_url, queue, name="other") as other,
    ):
        await searches.sweep.handle_due(0)
        await searches.claims.wait_and_read(0.01, 1)
        assert await searches.all() == [], "the wait has found no entry"
        job = await searches.client.submit("moves")
        attempt = await other.start_next()
        assert await searches.claims.wait_and_read(5, 1) == [], "another worker was faster"
        await worker_scripts(other).requeue(attempt.claim, attempt.number)
        (entry,) = await searches.claims.reclaim(1)
        assert entry.job_id == job.id
