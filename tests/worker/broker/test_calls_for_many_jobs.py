"""A worker reads entries and claims their jobs in one call of Redis, and ends jobs in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError
from tests.support.reclaims import reclaim
from tests.worker.broker.test_suspects import until, until_true, working

from llamaq.common.protocol.claim_scripts import ClaimScripts
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL, Attempt, Claimant, Reader
from llamaq.common.redis.connect import connect
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker.dead_letters import DeadLetters
from llamaq.worker.broker.job_streams import JobStreams
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.broker.worker_scripts import WorkerScripts


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The number of jobs in each call of `read`, `claim_jobs` and `finish_jobs`. Calls for no job are left out."""
    sizes: dict[str, list[int]] = {"read": [], "claim_jobs": [], "finish_jobs": []}

    def count(scripts: type, name: str, size: Callable[[Sequence[Any], Any], int]) -> None:
        original = getattr(scripts, name)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            reply = await original(*args, **kwargs)
            if n_jobs := size(args, reply):
                sizes[name].append(n_jobs)
            return reply

        monkeypatch.setattr(scripts, name, counted)

    count(
        ClaimScripts, "read", lambda _, reply: sum(one.outcome is not None for _, entries in reply for one in entries)
    )
    count(ClaimScripts, "claim_jobs", lambda args, _: len(args[1]))
    count(WorkerScripts, "finish_jobs", lambda args, _: len(args[1]))
    return sizes


async def test_jobs_are_claimed_and_ended_together(redis_url: str, queue: str, sizes: dict[str, list[int]]) -> None:
    async with AsyncClient(redis_url, queue) as client:
        n_jobs = MAX_JOBS_IN_CALL + 10
        jobs = await client.submit_many([{"prompt": "hello"} for _ in range(n_jobs)])
        async with working(redis_url, queue, capacity=n_jobs) as worker:
            await until(lambda: len(worker.admitted) == n_jobs)
            assert sizes["read"] == [MAX_JOBS_IN_CALL, 10], "a call takes at most MAX_JOBS_IN_CALL of them"
            assert sizes["claim_jobs"] == [], "the call that reads the entries claims the jobs too"
            for job in jobs:
                worker.end(job)
            for job in jobs:
                assert (await job.result(timeout=10)).finish_reason == "stop"
    assert sum(sizes["finish_jobs"]) == n_jobs
    assert max(sizes["finish_jobs"]) <= MAX_JOBS_IN_CALL
    assert len(sizes["finish_jobs"]) < n_jobs / 4


async def test_jobs_are_claimed_beside_large_requests_and_entries_that_name_no_job(
    redis_url: str, queue: str, sizes: dict[str, list[int]]
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        stream = client.keys.jobs(queue, 0, Priority.INTERACTIVE)
        prompts = ("x" * 2**20, "second", "third")
        jobs = []
        for prompt in prompts:
            await client.redis.xadd(stream, {"id": f"{queue}.0.not-a-job"})
            jobs.append(await client.submit(prompt))
        async with working(redis_url, queue) as worker:
            await until(lambda: len(worker.admitted) == len(jobs))
            assert (sizes["read"], sizes["claim_jobs"]) == ([1], [1, 1]), "the request of the first job is large"
            await until_true(lambda: client.redis.xlen(client.keys.dead(queue, 0)))
        assert await client.redis.xlen(client.keys.dead(queue, 0)) == len(prompts)


@pytest.mark.parametrize("has_waited", [False, True])
async def test_a_job_that_is_claimed_while_the_worker_stops_is_requeued_at_once_and_counts_no_crash(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, has_waited: bool
) -> None:
    waits, has_claimed, may_reply = asyncio.Event(), asyncio.Event(), asyncio.Event()
    read, wait_and_read = JobStreams.read, JobStreams.wait_and_read

    async def late(entries: Any) -> Any:
        if entries:
            has_claimed.set()
            await may_reply.wait()
        return entries

    async def read_late(streams: JobStreams, *args: Any) -> Any:
        return await late(await read(streams, *args))

    async def wait_and_read_late(streams: JobStreams, *args: Any) -> Any:
        waits.set()
        return await late(await wait_and_read(streams, *args))

    monkeypatch.setattr(JobStreams, "read", read_late)
    monkeypatch.setattr(JobStreams, "wait_and_read", wait_and_read_late)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        job = None if has_waited else await client.submit("hello")
        async with working(redis_url, queue) as worker:
            if job is None:
                await waits.wait()
                job = await client.submit("hello")
            await has_claimed.wait()
            assert worker.outbox.n_jobs == 0
            asyncio.get_running_loop().call_later(0.01, may_reply.set)
        stream = client.keys.jobs(queue, 0, Priority.INTERACTIVE)
        ((_, fields, _),) = await reclaim(other, stream, 10, LEASE_MS, trusted_until_ms=0)
        assert fields[b"id"].decode() == job.id
        assert (await job.status()).crashes == 0


async def test_the_jobs_of_one_priority_are_started_although_the_read_of_the_next_one_fails(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ClaimScripts.read

    async def read_interactive(scripts: ClaimScripts, reader: Reader, streams: Sequence[str], *args: Any) -> Any:
        if streams[0].endswith(Priority.BULK):
            raise ResponseError("broken on purpose")
        return await read(scripts, reader, streams, *args)

    monkeypatch.setattr(ClaimScripts, "read", read_interactive)
    redis = connect(redis_url, name="test")
    streams = JobStreams(WorkerQueue(redis, Keys(), queue, 2), Claimant("w1", LEASE_MS))
    await streams.open()
    async with AsyncClient(redis_url, queue, partitions=2) as client:
        jobs = [await client.submit("hello", idempotency_key=str(number)) for number in range(4)]
        found = [one for _, entries in await streams.read(8) for one in entries]
        assert {one.fields[b"id"].decode() for one in found} == {job.id for job in jobs}
        assert all(isinstance(one.outcome, Attempt) for one in found)
        with pytest.raises(ResponseError, match="broken on purpose"):
            await streams.read(8)
    await redis.aclose()


async def test_an_entry_that_cannot_become_a_dead_letter_does_not_stop_the_jobs_that_are_claimed_with_it(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    monkeypatch.setattr(DeadLetters, "bury_entry", refuse)
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.xadd(client.keys.jobs(queue, 0, Priority.INTERACTIVE), {"id": "not-a-job"})
        jobs = [await client.submit("hello") for _ in range(2)]
        async with working(redis_url, queue, capacity=3) as worker:
            await until(lambda: len(worker.admitted) == len(jobs))
