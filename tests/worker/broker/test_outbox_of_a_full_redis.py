"""The outbox while Redis is full: leases are kept, tokens wait, and cancellations are still reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from redis.exceptions import ResponseError
from tests.support.job_claims import worker_queue
from tests.support.outbox_rig import AT_ONCE, OutboxRig, until, working
from tests.support.reclaims import reclaim

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.keys import GROUP
from llamaq.common.redis.write_refusals import is_full
from llamaq.producer.testing import LEASE_MS
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import SlotLost
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn
from llamaq.worker.local.embedded_redis import EmbeddedRedis


@asynccontextmanager
async def full(redis: Any) -> AsyncIterator[None]:
    """Make Redis refuse writes that need memory, until the end of the block."""
    used = (await redis.info("memory"))["used_memory"]
    await redis.set("ballast", b"x" * 200_000)
    await redis.config_set("maxmemory", used + 100_000)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@pytest.fixture
def own_url() -> Iterator[str]:
    """A Redis server for one test alone, because `maxmemory` applies to the whole server."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.mark.starts_processes
@pytest.mark.parametrize("streams", [True, False])
async def test_jobs_keep_their_leases_while_redis_is_full_and_continue_afterwards(
    own_url: str, queue: str, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llamaq.worker.broker.outbox")
    async with working(own_url, queue, checkpoints=AT_ONCE, streams=streams, lease_s=0.1) as at:
        job, running = await at.begin()
        ending, last = await at.begin()
        requeued, withdrawn = await at.begin()
        task = asyncio.create_task(at.outbox.run())
        await at.put(running, 0, 1)
        await until(at.stored, job, [0, 1])
        redis = at.client.redis
        async with full(redis):
            await at.put(running, 2, 3)
            await at.put(last, 5)
            await at.end(last, 1)
            await at.put(withdrawn, 9)
            at.outputs.put([JobWithdrawn(withdrawn)])
            idle = [await idle_ms(at, running)]
            while "redis_full" not in caplog.text or n_renewals(idle) < 3:
                await asyncio.sleep(0.005)
                idle.append(await idle_ms(at, running))
            assert await at.stored(job) == [0, 1]
            assert at.outbox.n_jobs == 2
            assert (await ending.result(timeout=60)).tokens == (5,), "the end of a job passes"
        await until(at.stored, job, [0, 1, 2, 3])
        await until(at.stored, requeued, [9])
        while "redis_recovered" not in caplog.text:  # noqa: ASYNC110 - logged only after the flush that stored these results
            await asyncio.sleep(0.005)
        await cancel_tasks(task)
        logged = [record.getMessage().split()[0] for record in caplog.records if "redis" in record.getMessage()]
        assert logged == ["outbox.redis_full", "outbox.redis_recovered"], "many failed flushes cause one warning"
        assert "tokens_resent" not in caplog.text, "Redis stored exactly what the outbox expected"
        assert at.engine.released == []


def n_renewals(idle: list[int]) -> int:
    """Return the number of lease renewals: how often the idle time of the entry became shorter."""
    return sum(after < before for before, after in pairwise(idle))


async def idle_ms(at: OutboxRig, job: Job) -> int:
    lease = job.lease
    pending: Any = await at.client.redis.xpending_range(lease.stream, GROUP, lease.entry_id, lease.entry_id, 1)
    return int(pending[0]["time_since_delivered"])


@pytest.mark.starts_processes
async def test_a_flush_that_a_full_redis_refuses_stores_nothing_and_still_reports_cancellations(
    own_url: str, queue: str
) -> None:
    async with working(own_url, queue) as at:
        job, running = await at.begin()
        await job.cancel()
        await at.put(running, 0)
        async with full(at.client.redis):
            with pytest.raises(ResponseError) as caught:
                await at.outbox.flush()
            assert is_full(caught.value)
            assert at.engine.cancelled == [job.id]
            assert [type(event) for event in await at.events(job)] == [Started]
        await at.outbox.flush()
        assert await at.stored(job) == [0]


@pytest.mark.starts_processes
async def test_jobs_are_requeued_while_redis_is_full(own_url: str, queue: str) -> None:
    async with working(own_url, queue) as at:
        (_, withdrawn), (stopped, running), (dead, _) = [await at.begin() for _ in range(3)]
        await at.put(withdrawn, 1)
        await at.put(running, 2)
        await at.outbox.flush()
        await at.put(running, 3)
        at.outbox._jobs.remove(
            next(one for one in at.outbox._jobs if one.lease.job_id == dead.id)
        )  # its worker has died
        async with full(at.client.redis):
            at.outputs.put([JobWithdrawn(withdrawn)])
            await asyncio.sleep(0)
            with pytest.raises(ResponseError) as caught:
                await at.outbox.flush()
            assert is_full(caught.value)
            assert at.outbox.n_jobs == 1, "all tokens of the withdrawn job are stored"
            await at.outbox.close()
            upkeep = UpkeepScripts(worker_queue(at.claimer))
            assert await upkeep.release_worker(0, at.claimer.name) == 1
            stream = at.client.keys.of_job(stopped.id).interactive
            assert len(await reclaim(at.claimer, stream, 9, LEASE_MS, trusted_until_ms=0)) == 3
        assert await at.stored(stopped) == [2], "the next worker generates the token that Redis has refused"


@pytest.mark.starts_processes
async def test_the_outage_of_a_partition_ends_with_its_last_job(
    own_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(own_url, queue) as at:
        _, preempted = await at.begin()
        task = asyncio.create_task(at.outbox.run())
        async with full(at.client.redis), asyncio.timeout(60):
            at.outputs.put([SlotLost(preempted)])
            await until_true(lambda: at.outbox._has_outage)
            at.outputs.put([JobWithdrawn(preempted)])
            await until_true(lambda: not at.outbox.n_jobs and not at.outbox._has_outage)
        await cancel_tasks(task)
    assert "outbox.redis_full" in caplog.text, "Redis refuses to store that the job has lost its slot"


async def until_true(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that no event tells."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
