"""Jobs that wait for a slot move to a worker that has one, and interrupted jobs do not wait behind bulk jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.support.reclaims import reclaim
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_suspects import FOREVER, until, until_true, working

from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import GROUP, JobId
from llamaq.common.protocol.script_types import JobEntry, StreamEntries
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import intake as intake_module
from llamaq.worker.broker import worker_scripts as worker_scripts_module

MAX_QUESTION_MS = 100
"""The times in these tests differ by more than this from the times after which a job may move."""


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that a job stays with its first worker, and the time between two searches."""
    monkeypatch.setattr(worker_scripts_module, "MOVE_AFTER_S", 0.05)
    monkeypatch.setattr(intake_module, "SEARCH_EVERY_S", 0.05)


async def test_jobs_that_wait_for_a_slot_move_to_a_worker_with_free_slots(
    redis_url: str, queue: str, short_waits: None
) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=3, n_slots=1) as busy:
        jobs = [await client.submit(f"job {number}") for number in range(3)]
        await until(lambda: len(busy.admitted) == 3)
        running = next(job for job in jobs if job.id == busy.history[0])  # the first that was prepared has the slot
        waiting = [job for job in jobs if job is not running]
        await until_true(partial(_is_running, running))
        depth = await client.queue_depth()
        assert (depth.waiting, depth.running) == (2, 1)
        async with working(redis_url, queue, "w2", n_slots=2) as idle:
            await until(lambda: {job.id for job in waiting} == set(idle.admitted))
            await until(lambda: list(busy.admitted) == [running.id])
            for job in waiting:
                await until_true(partial(_is_running, job))
                status = await job.status()
                assert (status.worker, status.attempt, status.crashes) == ("w2", 2, 0)
                idle.generate(job)
                idle.end(job)
                assert (await job.result(timeout=10)).tokens == (65,)


async def _is_running(job: AsyncJob) -> bool:
    return (await job.status()).state is JobState.RUNNING


async def may_move(worker: FakeWorker, claim: JobEntry, waited_s: float, *, to: str = "another") -> bool:
    """Return whether a worker may take a job that has waited in its worker for this time.

    Meanwhile the job waits longer. If the machine has stopped this process or Redis for so long that it may matter, the
    answer is not that for `waited_s`, and the question is asked again.
    """
    queue = JobId.parse(claim.job_id).queue
    while True:
        asked_ms = await server_time_ms(worker.redis)
        claimed_ms = int(asked_ms - waited_s * 1000)
        await worker.redis.hset(worker.keys.of_job(claim.job_id).job, "claimed_ms", claimed_ms)
        found = bool(await worker_scripts(worker, to).movable_jobs(queue, 0, 10, max_crashes=3))
        if await server_time_ms(worker.redis) - asked_ms < MAX_QUESTION_MS:
            return found


async def test_a_job_stays_with_its_worker_at_first_and_longer_after_each_move(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        await worker.claim_scripts.claim_job(claim, "w0", LEASE_MS, at_risk=False)
        assert [await may_move(worker, claim, seconds) for seconds in (0, 0.5, 1.1)] == [False, False, True]
        assert not await may_move(worker, claim, 10, to="w0"), "the worker that has the job"
        # the same worker: no move
        await worker.claim_scripts.claim_job(replace(claim, from_attempt=1), "w0", LEASE_MS, at_risk=False)
        for number in (1, 2):
            await worker.claim_scripts.claim_job(
                replace(claim, from_attempt=number + 1), f"w{number}", LEASE_MS, at_risk=False
            )
        assert [await may_move(worker, claim, seconds) for seconds in (1.1, 3.5, 4.1)] == [False, False, True]
        await worker.redis.hset(worker.keys.of_job(claim.job_id).job, "move_factor", 10**6)
        assert await may_move(worker, claim, 31), "the time is bounded"


async def test_a_job_moves_although_the_clock_of_redis_was_set_back(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        await worker.claim_scripts.claim_job(claim, "w0", LEASE_MS, at_risk=False)
        assert await may_move(worker, claim, -3600)


@pytest.mark.parametrize("field", ["move_factor", "crashes", "attempt"])
async def test_a_damaged_job_does_not_keep_others_from_moving(redis_url: str, queue: str, field: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        damaged, other = [await client.submit("hello") for _ in range(2)]
        for job in (damaged, other):
            claim = await worker.claim()
            assert claim is not None
            await worker.claim_scripts.claim_job(claim, "w0", LEASE_MS, at_risk=False)
            await client.redis.hset(client.keys.of_job(job.id).job, "claimed_ms", 1)
        await client.redis.hset(client.keys.of_job(damaged.id).job, field, "x")
        found = await worker_scripts(worker, "another").movable_jobs(queue, 0, 10, max_crashes=3)
        assert other.id in {one.job_id for one in found}


async def test_an_entry_that_names_no_job_does_not_move_and_other_jobs_do(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        await worker.claim_scripts.claim_job(claim, "w0", LEASE_MS, at_risk=False)
        redis, key = worker.redis, client.keys.of_job(claim.job_id).job
        copy: Any = key.removesuffix(claim.job_id).encode() + b"\xff"  # another client copies the job
        await redis.copy(key, copy)
        await redis.hset(copy, "claimed_ms", 1)
        await redis.xadd(claim.stream, {"id": b"\xff"})
        await redis.xreadgroup(GROUP, "waiting", {claim.stream: ">"})
        assert await may_move(worker, claim, 10)
        (found,) = await worker_scripts(worker, "another").movable_jobs(queue, 0, 10, max_crashes=3)
        assert (found.job_id, found.from_attempt) == (claim.job_id, 1)


async def test_an_interrupted_job_soon_moves_to_a_worker_with_a_free_slot_however_often_it_was_interrupted(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit("hello")
        claim = (await worker.start_next()).claim
        for _ in range(5):
            assert await worker.begin(claim)
        await worker.claim_scripts.claim_job(claim, "full", LEASE_MS)
        assert [await may_move(worker, claim, seconds) for seconds in (0.1, 0.3)] == [False, True]


async def test_a_suspect_does_not_move_and_other_jobs_with_a_crash_do(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        await worker.claim_scripts.claim_job(claim, "w0", LEASE_MS)
        for crashes, moves in ((1, True), (2, False)):
            await worker.redis.hset(worker.keys.of_job(claim.job_id).job, "crashes", crashes)
            assert await may_move(worker, claim, 10) is moves


async def test_a_move_counts_as_a_crash_until_the_first_worker_shows_that_it_is_alive(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        first = await worker.start_next()
        claim = first.claim
        assert await worker.claim_scripts.claim_job(replace(claim, from_attempt=1), "second", LEASE_MS) == "stale", (
            "it has a slot"
        )
        await worker_scripts(worker).requeue(claim, first.number)
        again = await worker.begin(claim)
        assert again is not None
        await client.redis.hset(client.keys.of_job(job.id).job, "status", "queued")  # as before its slot
        moved = await worker.claim_scripts.claim_job(replace(claim, from_attempt=again.number), "second", LEASE_MS)
        assert not isinstance(moved, str)
        assert (await job.status()).crashes == 1
        assert (await again.emit([1], "a")).code == "lost"
        assert (await job.status()).crashes == 0
        assert not await client.redis.hexists(client.keys.metrics(queue, 0), "crashes"), "no worker has died"


async def test_an_interrupted_interactive_job_is_taken_although_bulk_jobs_fill_the_worker(
    redis_url: str, queue: str, short_waits: None
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        interrupted = await client.submit("interactive")
        attempt = await other.start_next()
        await attempt.emit([7], "x")
        async with working(redis_url, queue, capacity=2, n_slots=1) as worker:
            for _ in range(4):
                await client.submit("bulk", priority="bulk")
            await until(lambda: len(worker.admitted) == 2)
            await worker_scripts(other).requeue(attempt.claim, attempt.number)
            await until(lambda: interrupted.id in worker.admitted)
            assert worker.admitted[interrupted.id].generated_before == [7]


async def test_the_lease_of_the_holder_counts_and_not_that_of_the_taker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        slow, fast = await client.submit("slow"), await client.submit("fast")
        stream = client.keys.of_job(slow.id).interactive
        for lease_ms in (60_000, 20):
            claim = await worker.claim()
            assert claim is not None
            assert not isinstance(await worker.claim_scripts.claim_job(claim, f"lease {lease_ms}", lease_ms), str)
        taken: StreamEntries = []
        while not taken:
            taken = await reclaim(worker, stream, 10, 10, trusted_until_ms=FOREVER)
        assert [fields[b"id"].decode() for _, fields, _ in taken] == [fast.id]
        assert await reclaim(worker, stream, 10, 10, trusted_until_ms=0) == []
