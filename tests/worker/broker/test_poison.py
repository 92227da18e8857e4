"""Jobs that crash workers, on a real Redis: which crashes count, and when a counted crash is deducted."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.crashes import LEASE_S, begin, check_crash, crash_worker, crashes, open_job_claims, submit
from tests.support.job_claims import claims_of, worker_queue
from tests.support.shifted_clock import with_clock
from tests.support.started_jobs import field, start
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.script_types import Claimant, JobEntry
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker.crash_check import CrashCheck
from llamaq.worker.broker.live_workers import LiveWorkers
from llamaq.worker.broker.worker_scripts import CrashVerdict

# ---- which crashes count


async def test_a_crash_before_the_first_token_counts_once_although_it_is_checked_repeatedly(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        await begin(worker, claim, "first")
        for _ in range(3):
            assert await check_crash(worker, claim, "first") == "ok"
            assert await crashes(job) == 1
        assert (await job.status()).state is JobState.QUEUED
        assert (await begin(worker, claim, "second")).number == 2, "the attempt number does not count crashes"


async def test_a_stored_token_resets_the_crash_count_and_a_crash_after_it_does_not_count(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        assert await crash_worker(worker, claim, "first") == "ok"
        assert await crash_worker(worker, claim, "second") == "suspect"
        attempt = await begin(worker, claim, "third")
        await attempt.emit([1], "a")
        assert await check_crash(worker, claim, "third") == "ok"
        await begin(worker, claim, "fourth")
        assert await crashes(job) == 0
        assert await check_crash(worker, claim, "fourth") == "ok"
        assert await crashes(job) == 1, "no token since its last start: the count starts again"


async def test_a_requeue_does_not_count_as_a_crash(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        for name in ("first", "second", "third", "fourth"):
            attempt = await begin(worker, claim, name)
            assert await worker_scripts(worker, name).requeue(claim, attempt.number)
            assert await check_crash(worker, claim, "") == "ok"
        assert await crashes(job) == 0


async def test_a_requeue_by_a_crashing_worker_counts_as_a_crash_unless_the_job_stored_a_token(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        first = await begin(worker, claim, "first")
        await first.emit([1], "a")
        assert await worker_scripts(worker, "first").requeue(claim, first.number, crashed=True)
        assert await crashes(job) == 0
        codes = []
        for name in ("a", "b", "c"):
            attempt = await begin(worker, claim, name)
            assert await worker_scripts(worker, name).requeue(claim, attempt.number, crashed=True)
            assert not await worker_scripts(worker, name).requeue(claim, attempt.number, crashed=True)
            codes.append(await check_crash(worker, claim, ""))
        assert codes == ["ok", "suspect", "dead"]


async def test_the_metric_counts_each_crash_also_after_the_first_token(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        _, claim = await submit(client, worker)
        await crash_worker(worker, claim, "first")
        attempt = await begin(worker, claim, "second")
        await attempt.emit([1], "a")
        for _ in range(2):
            await check_crash(worker, claim, "second")
        attempt = await begin(worker, claim, "third")
        await attempt.emit([2], "b")
        for _ in range(2):
            await worker_scripts(worker, "third").requeue(claim, attempt.number, crashed=True)
        await begin(worker, claim, "fourth")
        await check_crash(worker, claim, "fourth", claimer="fourth")  # it lives, and its lease has expired
        assert await worker.redis.hget(worker.keys.metrics(queue, 0), "crashes") == b"3"


async def test_a_requeued_suspect_stays_a_suspect(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        for name in ("first", "second"):
            await crash_worker(worker, claim, name)
        attempt = await begin(worker, claim, "third")
        await worker_scripts(worker, "third").requeue(claim, attempt.number)
        assert await check_crash(worker, claim, "") == "suspect"
        assert await crashes(job) == 2


async def test_a_worker_that_reclaims_its_own_job_has_not_crashed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        await begin(worker, claim, "same")
        assert await check_crash(worker, claim, "same", claimer="same") == "ok"
        assert await crashes(job) == 0


@pytest.mark.parametrize(
    ("heartbeat_age_s", "n_crashes"), [(0.0, 0), (LEASE_S * 0.3, 0), (LEASE_S * 0.7, 1), (None, 1)]
)
async def test_a_worker_with_a_recent_heartbeat_has_not_crashed(
    redis_url: str, queue: str, heartbeat_age_s: float | None, n_crashes: int
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job_claims = await open_job_claims(worker)
        job, claim = await submit(client, worker)
        await begin(worker, claim, worker.name)
        if heartbeat_age_s is not None:
            await worker.announce(now_ms=int((time.time() - heartbeat_age_s) * 1000))
        assert await job_claims.check_crash(claim) == "ok"
        assert await crashes(job) == n_crashes


async def test_the_last_death_counts_only_when_the_worker_was_silent_for_one_more_lease(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job_claims = await open_job_claims(worker)
        job, claim = await submit(client, worker)
        for name in ("a", "b"):
            await crash_worker(worker, claim, name)
        suspect = await begin(worker, claim, worker.name)
        await worker.announce(now_ms=int((time.time() - LEASE_S * 0.7) * 1000))
        assert await job_claims.check_crash(claim) == "unsure"
        assert (await suspect.emit([], "")).code == "ok", "the worker was only stopped, and the job is still its own"
        assert await crashes(job) == 2
        await worker.announce(now_ms=int((time.time() - LEASE_S * 1.6) * 1000))
        assert await job_claims.check_crash(claim) == "dead"
        assert (await suspect.emit([1], "a")).code == "lost"


@pytest.mark.parametrize("lease_s", [1, 10, 30])
async def test_the_last_heartbeat_of_a_worker_is_known_until_its_death_is_certain(
    redis_url: str, queue: str, lease_s: int
) -> None:
    """Clients and workers that looked for live workers removed it from the list: the last death counted at once."""
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        while (verdicts := await verdicts_while_silent(client, worker, lease_s)) is None:
            pass
        assert verdicts == ["unsure", "unsure", "dead"]


async def verdicts_while_silent(client: AsyncClient, worker: FakeWorker, lease_s: int) -> list[CrashVerdict] | None:
    """Return the verdicts about a suspect whose last worker is silent for 0.7, then 1.45, then 1.6 leases.

    Clients and workers look for live workers before each check. None: the machine has stopped this process or Redis
    for so long that the death was certain before the last check.
    """
    job_claims = claims_of(worker, Claimant("successor", lease_s * 1000))
    await job_claims.open()
    _, claim = await submit(client, worker)
    for name in ("a", "b"):
        await crash_worker(worker, claim, name)
    await begin(worker, claim, worker.name)
    live_workers = LiveWorkers(worker_queue(worker), "successor", lease_s)
    verdicts = []
    for silent_leases in (0.7, 1.45, 1.6):
        heartbeat_ms = await server_time_ms(worker.redis) - int(lease_s * silent_leases * 1000)
        await worker.announce(now_ms=heartbeat_ms)
        await worker.redis.delete(worker.keys.worker(worker.name))  # its card has expired
        assert await client.workers() == ()
        assert await live_workers.find() == []
        verdicts.append(await job_claims.check_crash(claim))
        is_certain = await server_time_ms(worker.redis) - heartbeat_ms >= 1.5 * lease_s * 1000
        if is_certain and silent_leases < 1.5:
            return None
    return verdicts


async def test_a_worker_that_resumes_while_others_look_for_live_workers_stays_in_the_list(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        live_workers, workers = LiveWorkers(worker_queue(worker), "other", LEASE_S), worker.keys.workers(queue)
        remove_silent = live_workers._remove_silent

        async def resume_and_remove(*args: Any, **options: Any) -> Any:
            await worker.announce(now_ms=await server_time_ms(worker.redis))
            return await remove_silent(*args, **options)

        monkeypatch.setattr(live_workers, "_remove_silent", resume_and_remove)
        await worker.redis.zadd(workers, {worker.name: 1, "dead": 1})
        assert await live_workers.find() == []
        assert await worker.redis.zrange(workers, 0, -1) == [worker.name.encode()]
        assert await live_workers.find() == [worker.name]


@pytest.mark.parametrize(("ahead_s", "is_dead"), [(2 * LEASE_S, False), (-2 * LEASE_S, True)])
async def test_another_clock_of_the_partition_does_not_change_which_workers_are_dead(
    redis_url: str, queue: str, *, ahead_s: float, is_dead: bool
) -> None:
    """The nodes of a cluster have clocks of their own."""
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        scripts = worker_scripts(worker, "successor")
        scripts._check_crash = with_clock(scripts._check_crash, int(ahead_s))
        crash_check = CrashCheck(worker_queue(worker), scripts, Claimant("successor", LEASE_MS), max_crashes=3)
        job, claim = await submit(client, worker)
        await begin(worker, claim, worker.name)
        await worker.announce(now_ms=await server_time_ms(worker.redis) - is_dead * LEASE_MS)
        assert await crash_check.check(claim) == "ok"
        assert await crashes(job) == is_dead


async def test_another_clock_does_not_remove_a_worker_from_the_list(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        await worker.redis.delete(worker.keys.worker(worker.name))  # its card has expired
        seconds, micros = await worker.redis.time()

        async def time_of_another_node() -> tuple[int, int]:
            return seconds + 3600, micros

        monkeypatch.setattr(worker.redis, "time", time_of_another_node)
        assert await LiveWorkers(worker_queue(worker), "other", LEASE_S).find() == []
        assert await worker.redis.zrange(worker.keys.workers(queue), 0, -1) == [worker.name.encode()]


@pytest.mark.parametrize(("heartbeat_ms", "n_crashes"), [("+inf", 0), ("1e300", 0), ("-inf", 1), ("-7", 1)])
async def test_an_impossible_heartbeat_of_another_client_does_not_end_the_worker(
    redis_url: str, queue: str, heartbeat_ms: str, n_crashes: int
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job_claims = await open_job_claims(worker)
        job, claim = await submit(client, worker)
        await begin(worker, claim, "first")
        await worker.redis.zadd(worker.keys.workers(queue), {"first": heartbeat_ms})
        assert await job_claims.check_crash(claim) == "ok"
        assert await crashes(job) == n_crashes


async def test_a_job_that_another_worker_has_started_in_the_meantime_is_not_changed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        await begin(worker, claim, "first")
        running = await begin(worker, claim, "second")
        assert await check_crash(worker, claim, "first") == "stale"
        assert await crashes(job) == 0
        assert (await running.emit([1], "a")).code == "ok"


@pytest.mark.parametrize("is_last", [False, True])
async def test_a_live_worker_that_writes_after_the_check_does_not_start_its_attempt_again(
    redis_url: str, queue: str, *, is_last: bool
) -> None:
    async with AsyncClient(redis_url, queue, event_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await attempt.emit([1], "a")
        assert await check_crash(worker, attempt.claim, worker.name) == "ok"
        if is_last:
            await attempt.finish()
        else:
            await attempt.emit([2], "b")
        found: Any = await worker.redis.xrange(worker.keys.of_job(job.id).events)
        events = [codec.decode_event(fields[b"e"]) for _, fields in found]
        assert sum(isinstance(event, Started) for event in events) == 1
        if is_last:
            assert (await job.result()).tokens == (1,)
        else:  # the job is in its worker again, until it is claimed
            assert await field(worker, job.id, "started_attempt") == b"1"
            taken = await begin(worker, attempt.claim, "successor")
            await taken.emit([3], "c")
            assert await field(worker, job.id, "started_attempt") == b"2"


async def test_a_cancel_ends_a_job_at_once_whose_worker_has_died(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        assert await check_crash(worker, attempt.claim, worker.name) == "ok"
        assert await job.cancel()
        assert (await job.status()).state is JobState.FINISHED, "no worker has the job"


async def test_an_entry_that_does_not_belong_to_the_job_counts_no_crash(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        running = await begin(worker, claim, "first")
        assert await check_crash(worker, JobEntry(job.id, claim.stream, "1-1"), "first") == "ok"
        assert await crashes(job) == 0
        assert (await running.emit([1], "a")).code == "ok"


# ---- a counted crash is deducted


@pytest.mark.parametrize("call", ["flush", "finish", "requeue"])
async def test_a_worker_that_was_only_paused_uncounts_its_crash_once(redis_url: str, queue: str, call: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        await crash_worker(worker, claim, "dead")
        paused = await begin(worker, claim, "paused")
        assert await check_crash(worker, claim, "paused") == "suspect"
        await begin(worker, claim, "successor")
        for _ in range(2):
            if call == "flush":
                assert (await paused.emit([], "")).code == "lost"
            elif call == "finish":
                assert not await paused.finish()
            else:
                assert not await worker_scripts(worker, "paused").requeue(claim, paused.number)
            assert await crashes(job) == 1, "the first worker did crash"
        assert await check_crash(worker, claim, "successor", claimer="another") == "suspect"
        assert await crashes(job) == 2


async def test_an_attempt_that_was_lost_without_a_crash_uncounts_no_crash(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        await crash_worker(worker, claim, "dead")
        for _ in range(6):
            slow = await begin(worker, claim, "slow")
            await begin(worker, claim, "other")
            assert (await slow.emit([], "")).code == "lost"
        assert slow.number == 12, "the text of this number begins with the number of the attempt that crashed"
        assert await crashes(job) == 1
