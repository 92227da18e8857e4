"""Tenants get fair shares of the slots: the scripts claim their jobs in turns, and leave nothing in Redis behind.

The tests with `redis_url` run on a real server and on the fake server of `tests.support.fake_redis`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_redis import url_of_each_server
from tests.support.job_claims import worker_queue
from tests.support.reclaims import reclaim
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.protocol.script_types import Attempt
from llamaq.producer import AsyncClient, AsyncJob, IdempotencyConflict, InvalidRequest, JobState, TenantDepth
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.local.embedded_redis import EmbeddedRedis

TENANT_KEYS = ("turns:*", "shares:*")


redis_url = url_of_each_server


async def submit(client: AsyncClient, *tenants: str, **options: Any) -> list[AsyncJob]:
    """Submit one job for each of the tenants. An empty name stands for no tenant."""
    jobs: Any = [{"prompt": "x", "tenant": one or None, **options} for one in tenants]
    return list(await client.submit_many(jobs))


async def start(worker: FakeWorker, n_jobs: int) -> list[FakeAttempt]:
    return [await worker.start_next() for _ in range(n_jobs)]


def tenants_of(attempts: list[FakeAttempt]) -> str:
    return "".join(attempt.request.tenant or "-" for attempt in attempts)


async def tenant_keys(client: AsyncClient) -> list[str]:
    """Return the keys that the turns of the tenants of this queue use."""
    found: list[str] = []
    for pattern in TENANT_KEYS:
        match = f"llamaq:{{{client.queue}:*}}:{pattern}"
        found += [key.decode() async for key in client.redis.scan_iter(match=match, count=1000)]
    return found


async def test_one_job_of_a_tenant_is_the_next_beside_many_of_another(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"aaaaaaaa")
        first = await start(worker, 3)
        await submit(client, "b")
        assert tenants_of([*first, *await start(worker, 6)]) == "aaabaaaaa"


async def test_tenants_take_turns_and_the_jobs_of_each_stay_in_their_order(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = await submit(client, *"aaaabbc")
        stream = client.keys.jobs(queue, 0, Priority.INTERACTIVE)
        entries = await worker.claim_scripts.read_unclaimed(stream, 10, LEASE_MS)
        assert [fields[b"tenant"].decode() for _, fields, _ in entries] == list("abcabaa")
        order = [fields[b"id"].decode() for _, fields, _ in entries]
        assert [job.id for job in jobs if job.id in order[0:1] + order[3:4] + order[5:]] == [
            order[place] for place in (0, 3, 5, 6)
        ]


async def test_jobs_without_a_tenant_are_one_tenant_also_those_that_waited_before(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        before = await submit(client, *[""] * 3)
        await submit(client, *"bbb")
        after = await submit(client, "", "")
        order = await start(worker, 8)
        assert tenants_of(order) == "b-b-b---"
        without = [attempt.claim.job_id for attempt in order if attempt.request.tenant is None]
        assert without == [job.id for job in (*before, *after)]
        for attempt in order:
            assert await attempt.finish()
        assert await tenant_keys(client) == []
        assert await client.redis.xlen(client.keys.jobs(queue, 0, Priority.INTERACTIVE)) == 0


async def test_a_queue_without_tenants_has_no_keys_for_them_and_its_order_is_that_of_the_stream(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = await submit(client, *[""] * 4)
        assert [one.claim.job_id for one in await start(worker, 2)] == [job.id for job in jobs[:2]]
        assert await tenant_keys(client) == []


async def test_long_jobs_of_a_tenant_count_as_long_as_they_run(redis_url: str, queue: str) -> None:
    """With four slots, a tenant whose jobs never end has two of them, and another has its two for its short jobs."""
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"aaaa", *"b" * 12)
        running = await start(worker, 4)
        assert tenants_of(running) == "abab"
        for _ in range(8):
            ended = next(one for one in running if one.request.tenant == "b")
            await ended.finish()
            running.remove(ended)
            running.append(await worker.start_next())
            assert Counter(tenants_of(running)) == Counter("aabb")


async def test_priorities_have_turns_of_their_own(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"aab", priority="bulk")
        (interactive,) = await submit(client, "a")
        order = await start(worker, 4)
        assert order[0].claim.job_id == interactive.id
        assert tenants_of(order) == "aaba"
        (moved, _) = await submit(client, *"cc", priority="bulk")
        assert await moved.set_priority("interactive")
        assert (await worker.start_next()).claim.job_id == moved.id


@pytest.mark.parametrize("way", ["cancel", "purge", "queue_timeout_s"])
async def test_jobs_that_end_while_they_wait_leave_nothing_behind(redis_url: str, queue: str, way: str) -> None:
    options: dict[str, Any] = {"queue_timeout_s": 0.01} if way == "queue_timeout_s" else {}
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, "other")
        jobs = await submit(client, *"aabb", **options)
        if way == "cancel":
            for job in jobs:
                assert await job.cancel()
        elif way == "purge":
            assert set(await client.purge(tenant="a")) == {job.id for job in jobs[:2]}
            assert set(await client.purge(tenant="b")) == {job.id for job in jobs[2:]}
        for job in jobs:
            while (await job.status()).state is not JobState.FINISHED:  # noqa: ASYNC110  # the time must pass
                await asyncio.sleep(0.005)
        assert [job.tenant for job in await client.jobs()] == ["other"]
        await (await worker.start_next()).finish()
        assert await tenant_keys(client) == []


async def test_a_claimed_job_that_is_cancelled_no_longer_counts(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = await submit(client, *"aaab")
        claim = await worker.claim()
        assert claim is not None
        assert claim.job_id == jobs[0].id
        assert await jobs[0].cancel()
        assert await worker.claim_scripts.claim_job(claim, "fake", LEASE_MS) == "done"
        assert tenants_of(await start(worker, 3)) == "baa"


async def test_delayed_and_retried_jobs_wait_for_turns_too(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        (retried,) = await submit(client, "b", retries=1)
        attempt = await worker.start_next()
        error = Failed(code="internal", message="broken")
        delay = {"first_delay_s": 0.001, "max_delay_s": 0.001, "share": 1.0}
        assert await worker_scripts(worker).retry(attempt.increment(), error, **delay) is not None
        assert await tenant_keys(client) == []
        await submit(client, *"aaa")
        (delayed,) = await submit(client, "c", delay_s=0.001)
        ids = {retried.id, delayed.id}
        while not ids <= {job.job_id for job in await client.jobs() if job.run_at_ms is None}:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        order = await start(worker, 5)
        assert Counter(tenants_of(order[:3])) == Counter("abc")
        assert tenants_of(order[3:]) == "aa"


async def test_a_requeued_job_keeps_its_place_before_all_turns(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"aabb")
        attempt = await worker.start_next()
        assert await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        stream = client.keys.jobs(queue, 0, Priority.INTERACTIVE)
        (again,) = await reclaim(worker, stream, 5, LEASE_MS, trusted_until_ms=0)
        assert again[0].decode() == attempt.claim.entry_id
        assert isinstance(await worker.claim_scripts.claim_job(attempt.claim, "fake", LEASE_MS), Attempt)
        assert tenants_of(await start(worker, 3)) == "bab", "the requeued job counts as claimed"


async def test_a_paused_queue_gives_no_turn(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"ab")
        await client.pause()
        assert await worker.claim() is None
        await client.resume()
        assert tenants_of(await start(worker, 2)) == "ab"


@pytest.mark.parametrize("loss", ["entry", "line", "turns", "shares"])
async def test_lost_turns_are_repaired(redis_server: EmbeddedRedis, queue: str, loss: str) -> None:
    async with AsyncClient(redis_server.url, queue) as client, FakeWorker(redis_server.url, queue) as worker:
        jobs = await submit(client, *"aab")
        keys = {key.rpartition("}:")[2]: key for key in await tenant_keys(client)}
        if loss == "entry":
            entry: Any = await client.redis.hget(client.keys.of_job(jobs[0].id).job, "entry")
            await client.redis.xdel(client.keys.jobs(queue, 0, Priority.INTERACTIVE), entry)
        else:
            lost = {"line": "turns:interactive:a", "turns": "turns:interactive", "shares": "shares:interactive"}[loss]
            await client.redis.delete(keys[lost])
        scripts = UpkeepScripts(worker_queue(client))
        for _ in range(3):
            await scripts.sweep(0, ["fake"], pause_s=0, n_keys=100_000)
        claimed: set[str] = set()
        stream = client.keys.jobs(queue, 0, Priority.INTERACTIVE)
        while claim := await worker.claim():
            claimed.add(claim.job_id)
        found = await reclaim(worker, stream, 5, LEASE_MS, trusted_until_ms=2**52)
        claimed |= {fields[b"id"].decode() for _, fields, _ in found}
        assert claimed == {job.id for job in jobs}
        for job in jobs:
            assert await job.cancel()
        assert await tenant_keys(client) == []


async def test_a_job_with_a_new_entry_waits_once(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job, _ = await submit(client, *"ab")
        entry: Any = await client.redis.hget(client.keys.of_job(job.id).job, "entry")
        await client.redis.xdel(client.keys.jobs(queue, 0, Priority.INTERACTIVE), entry)
        await UpkeepScripts(worker_queue(client)).sweep(0, ["fake"], pause_s=0, n_keys=100_000)
        assert [(one.tenant, one.waiting) for one in (await client.queue_depth()).tenants] == [("a", 1), ("b", 1)]
        assert await job.position() == 1


async def delete_hash_and_entry(client: AsyncClient, attempt: FakeAttempt) -> None:
    """Delete the hash of a job as another client does, and its entry as a worker does with an entry without a job."""
    claim = attempt.claim
    await client.redis.delete(client.keys.of_job(claim.job_id).job)
    await client.redis.xack(claim.stream, GROUP, claim.entry_id)
    await client.redis.xdel(claim.stream, claim.entry_id)


async def claimed_jobs(client: AsyncClient) -> dict[str, int]:
    return {one.tenant: one.claimed for one in (await client.queue_depth()).tenants}


async def test_claimed_jobs_are_counted_again_when_the_hash_of_one_was_deleted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"aaa")
        first, second, _ = await start(worker, 3)
        await submit(client, *"ab")
        await delete_hash_and_entry(client, first)
        await second.finish()
        await UpkeepScripts(worker_queue(client)).sweep(0, ["fake"], pause_s=0)
        assert await claimed_jobs(client) == {"a": 1, "b": 0}


async def test_older_jobs_without_a_tenant_still_count_as_claimed_after_a_new_count(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, "", "")
        await submit(client, *"aaa")
        running = await start(worker, 4)
        assert tenants_of(running) == "a-a-"
        await delete_hash_and_entry(client, running.pop(0))
        await UpkeepScripts(worker_queue(client)).sweep(0, ["fake"], pause_s=0)
        assert await claimed_jobs(client) == {"": 2, "a": 1}
        running += await start(worker, 1)
        for attempt in running:
            assert await attempt.finish()
        assert await tenant_keys(client) == []


async def test_claimed_jobs_are_counted_again_beside_running_jobs_without_a_tenant(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *[""] * 3)
        await start(worker, 3)
        await submit(client, *"aa")
        first, _ = await start(worker, 2)
        await submit(client, *"ab")
        await delete_hash_and_entry(client, first)
        await UpkeepScripts(worker_queue(client)).sweep(0, ["fake"], pause_s=0)
        assert await claimed_jobs(client) == {"a": 1, "b": 0}
        assert tenants_of(await start(worker, 2)) == "ba"


async def test_the_depth_of_a_queue_and_the_list_of_jobs_tell_the_tenants(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"aab")
        await submit(client, "b", priority="bulk")
        await start(worker, 1)
        depth = await client.queue_depth()
        assert (depth.waiting, depth.running) == (3, 1)
        assert depth.tenants == (
            TenantDepth(tenant="a", waiting=1, claimed=1),
            TenantDepth(tenant="b", waiting=2, claimed=0),
        )
        assert [job.tenant for job in await client.jobs()] == list("aabb")
        assert [job.state for job in await client.jobs(tenant="a")] == [JobState.RUNNING, JobState.QUEUED]
        assert await client.redis.xlen(client.keys.jobs(queue, 0, Priority.INTERACTIVE)) == 3, (
            "jobs that have not ended"
        )


async def test_the_depth_has_at_most_the_demanded_number_of_tenants_and_those_that_wait_first(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await submit(client, *"abc")
        await start(worker, 3)
        await submit(client, *"de")
        found = []
        for max_tenants in range(7):
            depth = await queue_depth(client.redis, client.keys, queue, 1, max_tenants=max_tenants)
            found.append((sum(one.waiting for one in depth.tenants), sum(one.claimed for one in depth.tenants)))
        assert found == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 3)]


async def test_a_client_may_have_a_tenant(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, tenant="own") as client:
        await client.submit("x")
        await submit(client, "", "other")
        assert [job.tenant for job in await client.jobs()] == ["own", "own", "other"]
        first = await client.submit("x", idempotency_key="key", tenant="a")
        assert (await client.submit("x", idempotency_key="key", tenant="b")).id == first.id
        with pytest.raises(IdempotencyConflict):
            await client.submit("y", idempotency_key="key", tenant="b")
        with pytest.raises(InvalidRequest, match="tenant"):
            await client.submit("x", tenant="a b")
        with pytest.raises(InvalidRequest, match="tenant"):
            await client.submit("x", tenant="a" * 129)


async def test_the_position_of_a_job_counts_the_jobs_before_it(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = await submit(client, *[""] * 5)
        (bulk,) = await submit(client, "", priority="bulk")
        assert [await job.position() for job in (*jobs, bulk)] == [0, 1, 2, 3, 4, 5]
        attempt = await worker.start_next()
        claim = await worker.claim()
        assert claim is not None
        assert [await job.position() for job in (*jobs, bulk)] == [None, 0, 1, 2, 3, 4], "one waits in a worker"
        assert (await jobs[4].status()).position == 3
        assert await jobs[2].cancel()
        assert await jobs[4].position() in (2, 3), "a cancelled job may count until the one before it has a slot"
        await attempt.finish()
        assert [await job.position() for job in (jobs[0], jobs[2])] == [None, None]
        (later,) = await submit(client, "", delay_s=1000)
        assert await later.position() is None


async def test_the_position_of_a_tenants_job_does_not_count_running_jobs(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = await submit(client, *"aaabb")
        await start(worker, 1)
        assert [await job.position() for job in jobs] == [None, 1, 3, 0, 2]


async def test_the_position_of_a_tenants_job_counts_the_turns_of_the_others(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        older = await submit(client, "", "")
        a = await submit(client, *"a" * 20)
        b = await submit(client, *"bb")
        assert [await job.position() for job in (*older, *b)] == [2, 5, 1, 4]
        assert [await job.position() for job in (a[0], a[1], a[5], a[19])] == [0, 3, 9, 23]
        order = [(await worker.start_next()).claim.job_id for _ in range(24)]
        for job, bound in ((b[0], 1), (b[1], 4), (a[0], 0), (a[1], 3), (a[19], 23)):
            assert order.index(job.id) == bound


TENANTS = ("a", "b", "c", "d")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(TENANTS)),
        st.tuples(st.just("claim"), st.integers(1, 3)),
        st.tuples(st.just("finish"), st.integers(0, 100)),
        st.tuples(st.just("cancel"), st.integers(0, 100)),
    ),
    max_size=60,
)


class Model:
    """What the turns must be: for each tenant its waiting jobs in order, its claimed jobs and its turn."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}
        self.claimed: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}
        self.turns: dict[str, int] = {}
        self.n_turns = 0

    def set_turn(self, tenant: str) -> None:
        self.n_turns += 1
        self.turns[tenant] = self.n_turns

    def next_job(self) -> str:
        """Return the job that is claimed next: of the tenant with the fewest claimed jobs, then the oldest turn."""
        who = min(
            (one for one in TENANTS if self.waiting[one]), key=lambda one: (len(self.claimed[one]), self.turns[one])
        )
        job = self.waiting[who].pop(0)
        self.claimed[who].append(job)
        self.set_turn(who)
        return job


@settings(max_examples=15)
@given(steps=operations)
def test_no_tenant_gets_a_slot_while_another_one_with_fewer_waits(
    redis_server: EmbeddedRedis, steps: list[tuple[str, Any]]
) -> None:
    asyncio.run(follow_model(redis_server.url, f"test-{secrets.token_hex(6)}", steps))


async def follow_model(url: str, queue: str, steps: list[tuple[str, Any]]) -> None:
    """Do the steps in Redis and in the model, and compare each claim."""
    model, running = Model(), dict[str, FakeAttempt]()
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:

        async def claim(count: int) -> None:
            expected = [model.next_job() for _ in range(min(count, sum(map(len, model.waiting.values()))))]
            for job_id in expected:
                attempt = await worker.start_next()
                assert attempt.claim.job_id == job_id
                running[job_id] = attempt

        for what, value in steps:
            if what == "submit":
                (job,) = await submit(client, value)
                model.waiting[value].append(job.id)
                if len(model.waiting[value]) == 1:
                    model.set_turn(value)
            elif what == "claim":
                await claim(value)
            elif what == "finish" and running:
                job_id = sorted(running)[value % len(running)]
                attempt = running.pop(job_id)
                assert await attempt.finish()
                model.claimed[attempt.request.tenant or ""].remove(job_id)
            elif what == "cancel" and any(model.waiting.values()):
                jobs = [(tenant, job_id) for tenant, ids in model.waiting.items() for job_id in ids]
                tenant, job_id = jobs[value % len(jobs)]
                assert await client.job(job_id).cancel()
                model.waiting[tenant].remove(job_id)
        await claim(len(steps))
        for attempt in running.values():
            assert await attempt.finish()
        assert await tenant_keys(client) == []
