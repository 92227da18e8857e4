"""Replies to calls that claim jobs are lost: connections break after Redis has executed the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.reclaims import reclaim
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_suspects import FOREVER, until, until_true, working

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.script_types import Attempt, Claimant, Entry, JobEntry, Reader
from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.shared_round_trips import Command
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

BOTH = tuple(Priority)


class LostReplies:
    """Counts the replies that are lost. Only replies of scripts that have claimed a job are lost."""

    def __init__(self) -> None:
        self.n_left = 0
        """Number of replies to lose from now on."""

    def lose(self, args: Sequence[Any], reply: Any) -> None:
        if self.n_left and args[0] == "EVALSHA" and "b'run'" in str(reply):
            self.n_left -= 1
            raise RedisConnectionError("the connection broke after the script was executed")


@pytest.fixture
def lost_replies(monkeypatch: pytest.MonkeyPatch) -> LostReplies:
    lost, send, send_pipeline = LostReplies(), RetryingRedis.send, RetryingRedis.send_pipeline

    async def send_and_lose(client: RetryingRedis, args: Any, options: Any) -> Any:
        reply = await send(client, args, options)
        lost.lose(args, reply)
        return reply

    async def send_pipeline_and_lose(client: RetryingRedis, commands: Sequence[Command], transaction: bool) -> Any:
        replies = await send_pipeline(client, commands, transaction)
        for (args, _), reply in zip(commands, replies, strict=True):
            lost.lose(args, reply)
        return replies

    monkeypatch.setattr(RetryingRedis, "send", send_and_lose)
    monkeypatch.setattr(RetryingRedis, "send_pipeline", send_pipeline_and_lose)
    return lost


class ReaderWithNumbers:
    """Reads the job streams of one partition like `JobStreams`. The test decides whether a reply was lost."""

    def __init__(self, connection: FakeWorker, name: str) -> None:
        self._connection = connection
        self._name = name
        self._streams = [connection.keys.jobs(connection.queue, 0, priority) for priority in BOTH]

    async def read(self, *numbers: int, count: int = 8, lease_ms: int = LEASE_MS) -> list[Entry]:
        """Return the entries of all streams."""
        n_replies = dict(zip(self._streams, numbers, strict=True))
        reader = Reader(Claimant(self._name, lease_ms), "process", n_replies)
        found = await self._connection.claim_scripts.read(reader, self._streams, count, count)
        return [one for _, entries in found for one in entries]


@pytest.mark.parametrize("n_lost", [1, 10], ids=["the client calls again", "the intake calls again after an error"])
async def test_jobs_whose_claim_got_no_reply_are_run_in_the_same_attempt(
    redis_url: str, queue: str, lost_replies: LostReplies, n_lost: int
) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue) as worker:
        lost_replies.n_left = n_lost
        jobs = [await client.submit("hello") for _ in range(3)]
        await until(lambda: len(worker.admitted) == len(jobs))
        assert lost_replies.n_left == 0
        for job in jobs:
            status = await job.status()
            assert (status.attempt, status.crashes) == (1, 0)
            worker.end(job)
            await job.result(timeout=10)


async def test_another_worker_does_not_count_a_crash_because_a_reply_was_lost(
    redis_url: str, queue: str, lost_replies: LostReplies
) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=1) as worker:
        lost_replies.n_left = 1
        jobs = [await client.submit("hello") for _ in range(2)]
        await until(lambda: worker.admitted)
        assert list(worker.admitted) == [jobs[0].id], "the job of the lost reply"
        async with working(redis_url, queue, "w2", capacity=1) as other:
            await until(lambda: jobs[1].id in other.admitted)
        assert lost_replies.n_left == 0
        assert [(await job.status()).crashes for job in jobs] == [0, 0]


async def test_a_repeated_read_changes_nothing_and_has_the_same_reply(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as connection:
        for priority in (*BOTH, *BOTH):
            await client.submit("hello", priority=priority)
        reader = ReaderWithNumbers(connection, "w1")
        first = await reader.read(0, 0, count=3)
        assert [_number(one) for one in first] == [1, 1, 1], "two interactive jobs and a bulk job"
        again = await reader.read(0, 0, count=3)
        assert [(one.fields[b"id"], _number(one)) for one in again] == [(one.fields[b"id"], 1) for one in first]
        (last,) = await reader.read(1, 1)
        assert last.fields[b"id"] not in {one.fields[b"id"] for one in first}


async def test_a_call_that_redis_executes_late_claims_no_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as connection:
        reader = ReaderWithNumbers(connection, "w1")
        for number in range(2):
            await client.submit("hello")
            assert [_number(one) for one in await reader.read(number, 0)] == [1]
        await client.submit("hello")
        assert await reader.read(0, 0) == [], "the worker has received the replies to this call and a later one"
        assert [_number(one) for one in await reader.read(2, 0)] == [1]


async def test_a_repeated_read_leaves_jobs_that_have_ended_or_are_in_another_worker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as connection:
        cancelled, moved = [await client.submit("hello") for _ in range(2)]
        reader = ReaderWithNumbers(connection, "w1")
        first = await reader.read(0, 0)
        await cancelled.cancel()
        claim = JobEntry(moved.id, client.keys.jobs(queue, 0, Priority.INTERACTIVE), first[1].entry_id.decode())
        assert isinstance(
            await connection.claim_scripts.claim_job(replace(claim, from_attempt=1), "w2", LEASE_MS), Attempt
        )
        assert (await moved.status()).crashes == 1, "the first worker may have died"
        assert [one.outcome for one in await reader.read(0, 0)] == ["stale"]
        status = await moved.status()
        assert (status.worker, status.attempt, status.crashes) == ("w2", 2, 0), "the first worker is alive"
        new = await client.submit("new")
        assert [one.fields[b"id"].decode() for one in await reader.read(1, 0)] == [new.id]


async def test_a_worker_without_redis_for_longer_than_its_lease_removes_the_crash_of_a_job_that_it_does_not_know(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as connection:
        job = await client.submit("hello")
        reader = ReaderWithNumbers(connection, "w1")
        (first,) = await reader.read(0, 0, lease_ms=1)
        stream = client.keys.jobs(queue, 0, Priority.INTERACTIVE)
        await until_true(lambda: reclaim(connection, stream, 1, LEASE_MS, trusted_until_ms=FOREVER))
        claim = JobEntry(job.id, stream, first.entry_id.decode())
        verdict = await worker_scripts(connection, "w2").check_crash(
            claim, last_worker="w1", silent_ms=FOREVER, dead_after_s=1, max_crashes=3
        )
        assert (verdict, (await job.status()).crashes) == ("ok", 1)
        assert isinstance(await connection.claim_scripts.claim_job(claim, "w2", LEASE_MS), Attempt)
        assert [one.outcome for one in await reader.read(0, 0)] == ["stale"]
        assert (await job.status()).crashes == 0


async def test_new_jobs_are_read_although_all_jobs_of_a_lost_reply_have_ended(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as connection:
        job = await client.submit("hello")
        reader = ReaderWithNumbers(connection, "w1")
        assert len(await reader.read(0, 0)) == 1
        await job.cancel()
        new = await client.submit("new")
        assert [one.fields[b"id"].decode() for one in await reader.read(0, 0)] == [new.id]


@pytest.mark.starts_processes
async def test_a_full_redis_accepts_a_repeated_read(queue: str) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client, FakeWorker(server.url, queue) as connection:
            moved, here, gone = [await client.submit("hello") for _ in range(3)]
            reader = ReaderWithNumbers(connection, "w1")
            first = await reader.read(0, 0)
            claim = JobEntry(moved.id, client.keys.jobs(queue, 0, Priority.INTERACTIVE), first[0].entry_id.decode())
            await connection.claim_scripts.claim_job(replace(claim, from_attempt=1), "w2", LEASE_MS)
            await client.redis.delete(client.keys.of_job(gone.id).job)
            await client.redis.config_set("maxmemory", "1mb")
            replies = [one.outcome for one in await reader.read(0, 0)]
            assert [type(one) if isinstance(one, Attempt) else one for one in replies] == ["stale", Attempt, "gone"]
            assert [(await job.status()).crashes for job in (moved, here)] == [0, 0]
            await client.redis.delete(client.keys.of_job(here.id).job, client.keys.of_job(moved.id).job)
            assert [one.outcome for one in await reader.read(0, 0)] == ["gone"] * 3, "the script writes nothing"
            await client.redis.config_set("maxmemory", "0")


def _number(entry: Entry) -> int | None:
    return entry.outcome.number if isinstance(entry.outcome, Attempt) else None


async def test_a_job_that_moves_here_is_run_although_the_reply_to_its_claim_was_lost(
    redis_url: str, queue: str, lost_replies: LostReplies
) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue, capacity=2, n_slots=1) as busy:
        first, waiting = [await client.submit("hello") for _ in range(2)]
        await until(lambda: len(busy.admitted) == 2)
        lost_replies.n_left = 1
        async with working(redis_url, queue, "w2", capacity=1) as idle:
            await until(lambda: waiting.id in idle.admitted)
            await until(lambda: list(busy.admitted) == [first.id])
            status = await waiting.status()
            assert (status.worker, status.attempt, status.crashes) == ("w2", 3, 0)
        assert lost_replies.n_left == 0
