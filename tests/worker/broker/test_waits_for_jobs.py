"""A worker with a free slot claims new jobs in the call that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.worker.broker.test_suspects import until, working

from llamaq.common.protocol.job_request import Priority
from llamaq.producer import AsyncClient
from llamaq.worker.broker import intake
from llamaq.worker.broker.job_claims import ClaimReply, JobClaims

ALL = tuple(Priority)


class Calls:
    """The calls with which workers look for new jobs, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.n_running_waits = 0
        """Calls of `wait_and_read` that have not returned."""
        read, wait, wait_and_read = JobClaims.read, JobClaims.wait, JobClaims.wait_and_read

        async def recorded_read(claims: JobClaims, n: int, priorities: Sequence[Priority] = ALL) -> list[ClaimReply]:
            self.names.append("read")
            return await read(claims, n, priorities)

        async def recorded_wait(claims: JobClaims, timeout_s: float, priorities: Sequence[Priority] = ALL) -> None:
            self.names.append("wait")
            await wait(claims, timeout_s, priorities)

        async def recorded_wait_and_read(claims: JobClaims, wait_s: float, count: int) -> list[ClaimReply]:
            self.names.append("wait_and_read")
            self.n_running_waits += 1
            replies = await wait_and_read(claims, wait_s, count)
            self.n_running_waits -= 1
            return replies

        monkeypatch.setattr(JobClaims, "read", recorded_read)
        monkeypatch.setattr(JobClaims, "wait", recorded_wait)
        monkeypatch.setattr(JobClaims, "wait_and_read", recorded_wait_and_read)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record the calls. A wait does not end before there is a job."""
    monkeypatch.setattr(intake, "SEARCH_EVERY_S", 30.0)
    monkeypatch.setattr(intake, "LONGEST_WAIT_S", 30.0)
    return Calls(monkeypatch)


async def test_an_idle_worker_reads_once_and_then_only_behind_its_waits(
    redis_url: str, queue: str, calls: Calls
) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue) as worker:
        for n_jobs in range(1, 4):
            await client.submit("hello")
            while len(worker.admitted) < n_jobs or len(calls.names) < n_jobs + 2:  # noqa: ASYNC110  # a thread adds
                await asyncio.sleep(0.01)
    assert calls.names == ["read", *["wait_and_read"] * 4]


async def test_a_worker_without_a_free_slot_leaves_new_jobs_to_workers_with_one(
    redis_url: str, queue: str, calls: Calls
) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=3, n_slots=1) as worker:
        await client.submit("first")
        await until(lambda: len(worker.admitted) == 1)
        await until(lambda: calls.names[-1] == "wait")
        calls.names.clear()
        await client.submit("second")  # the worker has room for it, but no slot
        await until(lambda: len(worker.admitted) == 2)
        assert "wait_and_read" not in calls.names


async def test_a_worker_that_stops_ends_its_wait(redis_url: str, queue: str, calls: Calls) -> None:
    async with working(redis_url, queue):
        await until(lambda: calls.n_running_waits)
    assert calls.n_running_waits == 0
