"""While Redis is full, `flush.lua` still records which jobs have a slot, and removes the deaths of live workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ResponseError
from tests.support.started_jobs import field, start
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_outbox_of_a_full_redis import full

from llamaq.common.protocol import codec
from llamaq.common.protocol.attempt_scripts import AttemptScripts
from llamaq.common.protocol.job_events import Failed, Started, Tokens
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.script_types import Attempt, FlushReply, TerminalWrite
from llamaq.common.redis.write_refusals import is_full
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.broker import worker_scripts as worker_scripts_module
from llamaq.worker.local.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.starts_processes


@pytest.fixture
def own_url() -> Iterator[str]:
    """A Redis server for one test alone, because `maxmemory` applies to the whole server."""
    with EmbeddedRedis() as server:
        yield server.url


async def claim(client: AsyncClient, worker: FakeWorker, **options: Any) -> tuple[AsyncJob, FakeAttempt]:
    """Submit a job with these options, and claim it. It waits for a slot in the worker."""
    job = await client.submit("hello", **options)
    entry = await worker.claim()
    assert entry is not None
    claimed = await worker.claim_scripts.claim_job(entry, worker.name, LEASE_MS)
    assert isinstance(claimed, Attempt)
    return job, FakeAttempt(worker, entry, claimed)


async def move(attempt: FakeAttempt, to: str) -> FakeAttempt:
    """Let another worker claim a job that waits for a slot. This counts as a death of the first worker."""
    entry = replace(attempt.claim, from_attempt=attempt.number)
    moved = await attempt.worker.claim_scripts.claim_job(entry, to, LEASE_MS)
    assert isinstance(moved, Attempt)
    assert await field(attempt.worker, attempt.claim.job_id, "crashes") == b"1"
    return FakeAttempt(attempt.worker, attempt.claim, moved)


def assert_refused(reply: FlushReply, n_stored: int) -> None:
    """Assert that a full Redis has refused the tokens of a job, of which it has stored `n_stored` tokens."""
    assert (reply.code, reply.stored) == ("ok", n_stored)
    assert is_full(ResponseError(reply.refusal))


@pytest.mark.parametrize("renew", [True, False])
async def test_a_job_that_gets_a_slot_while_redis_is_full_runs(
    own_url: str, queue: str, renew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_scripts_module, "MOVE_AFTER_S", 0.0)
    async with AsyncClient(own_url, queue) as client, FakeWorker(own_url, queue) as worker:
        job, attempt = await claim(client, worker, queue_timeout_s=600)
        _, earlier = await start(client, worker)
        idle, scripts = worker_scripts(worker, "idle"), JobScripts(client.redis, client.keys)
        assert [one.job_id for one in await idle.movable_jobs(queue, 0, 10, max_crashes=3)] == [job.id]
        await client.redis.hset(client.keys.of_job(job.id).job, "queue_deadline_ms", 1)
        async with full(client.redis):
            for _ in range(2):
                flushes = [attempt.increment([7], "a"), earlier.increment([8], "b")]
                for reply in await worker.scripts.flush(flushes, LEASE_MS, renew=renew):
                    assert_refused(reply, 0)
            assert (await job.status()).state is JobState.RUNNING
            stream, entry = attempt.claim.stream, attempt.claim.entry_id
            (pending,) = await client.redis.xpending_range(stream, GROUP, entry, entry, 1)
            assert pending["consumer"] == worker.name.encode()
            assert await idle.movable_jobs(queue, 0, 10, max_crashes=3) == []
            assert await scripts.expire(job.id) == "none", "its queue_timeout_s counts up to its first slot"
            assert await job.cancel()
            assert (await job.status()).state is JobState.RUNNING, "its worker ends it"
        reply = await attempt.emit([7], "a")
        assert (reply.code, reply.stored) == ("cancel", 1)
        entries: Any = await client.redis.xrange(client.keys.of_job(job.id).events)
        events = [codec.decode_event(fields[b"e"]) for _, fields in entries]
        assert [type(event) for event in events] == [Started, Tokens]


async def test_a_job_that_loses_its_slot_while_redis_is_full_stays_with_its_worker(own_url: str, queue: str) -> None:
    async with AsyncClient(own_url, queue) as client, FakeWorker(own_url, queue) as worker:
        job, attempt = await start(client, worker)
        async with full(client.redis):
            preempted = replace(attempt.increment([7], "a"), has_slot=False)
            (reply,) = await worker.scripts.flush([preempted], LEASE_MS, renew=True)
            assert_refused(reply, 0)
            assert (await job.status()).state is JobState.RUNNING, "another worker would not have its tokens"
        await worker.scripts.flush([preempted], LEASE_MS, renew=True)
        assert (await job.status()).state is JobState.QUEUED


def terminal_write() -> TerminalWrite:
    event = Failed(code="internal", message="broken on purpose")
    return TerminalWrite(event, {"error": codec.encode_event(event)})


@pytest.mark.parametrize("call", ["flush", "finish", "requeue"])
async def test_the_death_of_a_live_worker_is_removed_while_redis_is_full(own_url: str, queue: str, call: str) -> None:
    async with AsyncClient(own_url, queue) as client, FakeWorker(own_url, queue) as worker:
        job, first = await claim(client, worker)
        _, running = await start(client, worker)
        await move(first, "second")
        async with full(client.redis):
            if call == "flush":
                flushes = [first.increment([7], "a"), running.increment([8], "b")]
                lost, refused = await worker.scripts.flush(flushes, LEASE_MS, renew=False)
                assert lost.code == "lost"
                assert_refused(refused, 0)
            elif call == "finish":
                assert (await worker.scripts.finish(first.increment(), terminal_write())).code == "lost"
            else:
                assert not await worker_scripts(worker).requeue(first.claim, first.number)
            assert (await job.status()).crashes == 0
            assert await field(worker, job.id, "deaths") == b""


async def test_a_job_that_has_ended_expires_although_its_first_worker_is_alive(own_url: str, queue: str) -> None:
    async with AsyncClient(own_url, queue) as client, FakeWorker(own_url, queue) as worker:
        job, first = await claim(client, worker)
        second = await move(first, "second")
        scripts = AttemptScripts(worker.redis, worker.keys, "second")
        (end,) = await scripts.finish_jobs([(second.increment(), terminal_write())])
        assert not isinstance(end, ResponseError)
        assert end.code == "ok"
        async with full(client.redis):
            (lost,) = await worker.scripts.flush([first.increment([7], "a")], LEASE_MS, renew=False)
            assert lost.code == "lost"
            assert await client.redis.pttl(client.keys.of_job(job.id).job) > 0
