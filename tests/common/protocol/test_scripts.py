"""The scripts that claim, flush and finish jobs refuse writes of old attempts, and a repeated call changes nothing.

Every test runs on a real server and on the fake server of `tests.support.fake_redis`. So other tests may use the
fake server.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from redis.exceptions import ResponseError
from tests.support.fake_redis import url_of_each_server
from tests.support.started_jobs import field, start
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished, Started, Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.keys import GROUP, JobId
from llamaq.common.protocol.script_types import (
    Attempt,
    Claimant,
    FinishReply,
    JobEntry,
    TerminalWrite,
)
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeAttemptScripts, FakeWorker

redis_url = url_of_each_server


async def stored_events(worker: FakeWorker, job_id: str) -> list[Any]:
    entries: Any = await worker.redis.xrange(worker.keys.of_job(job_id).events)
    return [codec.decode_event(fields[b"e"]) for _, fields in entries]


def terminal_write(reason: FinishReason = FinishReason.STOP) -> TerminalWrite:
    return TerminalWrite(Finished(finish_reason=reason, stats=JobStats()), {"finish_reason": reason.value})


# start


async def test_an_entry_with_the_same_id_in_the_other_stream_does_not_start_the_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, _ = await start(client, worker)
        keys = worker.keys.of_job(job.id)
        entry = (await field(worker, job.id, "entry") or b"").decode()
        await worker.redis.xadd(keys.bulk, {"id": job.id}, id=entry)
        assert await worker.claim_scripts.claim_job(JobEntry(job.id, keys.bulk, entry), "another", LEASE_MS) == "done"
        assert await worker.redis.xlen(keys.bulk) == 0
        assert (await job.status()).attempt == 1


async def test_each_start_is_a_new_attempt_and_returns_the_number_of_stored_tokens(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        assert attempt.number == 1
        await attempt.emit([1, 2, 3], "abc")
        again = await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS)
        assert isinstance(again, Attempt)
        assert (again.number, again.generated) == (2, 3)
        status = await job.status()
        assert (status.attempt, status.worker, status.state) == (2, "other", JobState.QUEUED)


async def test_a_claimed_job_waits_until_a_flush_says_that_it_has_a_slot(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        claimed = await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
        assert isinstance(claimed, Attempt)
        attempt = FakeAttempt(worker, claim, claimed)
        waiting = replace(attempt.increment(), has_started=False, has_slot=False)
        assert (await worker.scripts.flush([waiting], LEASE_MS, renew=True))[0].code == "ok"
        status, depth = await job.status(), await client.queue_depth()
        assert (status.state, status.started_ms, depth.waiting) == (JobState.QUEUED, None, 1)
        for _ in range(2):
            await attempt.emit([], "")
        status, depth = await job.status(), await client.queue_depth()
        assert (status.state, depth.waiting, depth.running) == (JobState.RUNNING, 0, 1)
        assert status.started_ms is not None
        assert await stored_events(worker, job.id) == [Started(attempt=1, worker="fake")]


async def test_claiming_a_missing_job_returns_gone_and_an_ended_job_returns_done(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await attempt.finish()
        assert await worker.claim_scripts.claim_job(attempt.claim, "fake", LEASE_MS) == "done"
        missing = JobEntry(str(JobId.new(queue)), attempt.claim.stream, "1-1")
        assert await worker.claim_scripts.claim_job(missing, "fake", LEASE_MS) == "gone"
        assert (await job.status()).attempt == 1


async def test_an_entry_that_was_not_made_for_the_job_is_dropped(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        forged: Any = await worker.redis.xadd(attempt.claim.stream, {"id": job.id})
        claim = await worker.claim()
        assert claim == JobEntry(job.id, attempt.claim.stream, forged.decode())
        assert await worker.claim_scripts.claim_job(claim, "fake", LEASE_MS) == "done"
        assert (await client.queue_depth()).running == 1


async def test_a_job_that_waited_longer_than_its_queue_timeout_ends_with_deadline_at_its_start(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("late", queue_timeout_s=0.001)
        claim = await worker.claim()
        assert claim is not None
        await asyncio.sleep(0.01)  # until the deadline has passed on the clock of Redis
        assert await worker.claim_scripts.claim_job(claim, "fake", LEASE_MS) == "ended"
        result = await client.job(job.id).result(timeout=60)
        assert (result.finish_reason, result.text, result.tokens) == (FinishReason.DEADLINE, "", ())


async def test_the_queue_timeout_does_not_count_for_a_second_attempt(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("in time", queue_timeout_s=1000)
        attempt = await worker.start_next()
        await worker.redis.hset(client.keys.of_job(job.id).job, "queue_deadline_ms", "1")
        assert isinstance(await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS), Attempt)


async def test_of_several_jobs_that_are_claimed_together_a_damaged_one_affects_no_other(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit("hello") for _ in range(4)]
        claims = [claim for claim in [await worker.claim() for _ in jobs] if claim is not None]
        await worker.redis.set(worker.keys.of_job(jobs[1].id).job, "not a hash")
        await jobs[2].cancel()
        outcomes = await worker.claim_scripts.claim_jobs(claims, Claimant("w", LEASE_MS))
        assert isinstance(outcomes[1], ResponseError)
        assert outcomes[2] == "done"
        assert [outcome.number for outcome in outcomes if isinstance(outcome, Attempt)] == [1, 1]
        for job in (jobs[0], jobs[3]):
            assert ((await job.status()).attempt, (await job.status()).worker) == (1, "w")


async def test_a_call_claims_no_more_jobs_than_it_can_return_requests_of(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit("x" * size) for size in (10, 2**20, 10)]
        claims = [claim for claim in [await worker.claim() for _ in jobs] if claim is not None]
        outcomes = await worker.claim_scripts.claim_jobs(claims, Claimant("w", LEASE_MS))
        assert [type(outcome) for outcome in outcomes] == [Attempt, Attempt]
        assert (await jobs[2].status()).attempt == 0, "the third job is claimed by another call"
        (last,) = await worker.claim_scripts.claim_jobs([claims[2]], Claimant("w", LEASE_MS))
        assert isinstance(last, Attempt)


# flush


async def test_a_flush_sent_twice_stores_once(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        increment = attempt.increment([1, 2], "ab")
        for _ in range(2):
            reply = (await worker.scripts.flush([increment], LEASE_MS, renew=False))[0]
            assert (reply.code, reply.stored) == ("ok", 2)
        assert [e.tokens for e in await stored_events(worker, job.id) if isinstance(e, Tokens)] == [(1, 2)]


async def test_a_flush_with_a_gap_stores_nothing_and_returns_the_number_of_stored_tokens(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        ahead = attempt.increment([3], "c", offset=2)
        reply = (await worker.scripts.flush([ahead], LEASE_MS, renew=False))[0]
        assert (reply.code, reply.stored) == ("ok", 0)
        assert not [e for e in await stored_events(worker, job.id) if isinstance(e, Tokens)]


async def test_only_the_newest_attempt_writes(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, old = await start(client, worker)
        await worker.claim_scripts.claim_job(old.claim, "other", LEASE_MS)
        assert (await old.emit([1], "a")).code == "lost"
        assert not await old.finish()
        assert await worker_scripts(worker).requeue(old.claim, old.number) is False
        assert (await job.status()).finished_ms is None
        assert not [e for e in await stored_events(worker, job.id) if not isinstance(e, Started)]


async def test_a_flush_of_many_jobs_returns_a_reply_for_each_of_them(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        runs = [await start(client, worker) for _ in range(3)]
        await runs[1][0].cancel()
        await runs[2][1].finish()
        increments = [attempt.increment([1], "a") for _, attempt in runs]
        replies = await worker.scripts.flush(increments, LEASE_MS, renew=True)
        assert [(reply.code, reply.stored) for reply in replies] == [("ok", 1), ("cancel", 1), ("lost", 0)]


async def test_renewing_a_lease_changes_only_the_idle_time_and_the_consumer(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        _, attempt = await start(client, worker)
        stream = attempt.claim.stream
        await worker_scripts(worker).requeue(JobEntry(attempt.claim.job_id, stream, attempt.claim.entry_id), None)
        before: Any = await worker.redis.xpending_range(stream, GROUP, "-", "+", 10)
        assert before[0]["consumer"] == b"waiting"
        await worker.scripts.flush([attempt.increment()], LEASE_MS, renew=True)
        after: Any = await worker.redis.xpending_range(stream, GROUP, "-", "+", 10)
        assert before[0]["time_since_delivered"] >= 10**12
        assert 10**11 - LEASE_MS <= after[0]["time_since_delivered"] < 10**11
        assert after[0]["consumer"] == b"fake"
        assert after[0]["times_delivered"] == before[0]["times_delivered"] == 1


async def test_a_flush_returns_the_number_of_subscribers(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        assert (await attempt.emit([], "")).listeners == 0
        async with worker.redis.pubsub() as pubsub:
            await pubsub.subscribe(client.keys.of_job(job.id).channel)
            await pubsub.get_message(timeout=60)
            assert (await attempt.emit([], "")).listeners == 1
            assert (await attempt.emit([1], "a")).listeners == 1
            unwatched = replace(attempt.increment([2], "b"), is_watched=False)
            (reply,) = await worker.scripts.flush([unwatched], LEASE_MS, renew=True)
            assert (reply.stored, reply.listeners) == (2, 0)


async def test_a_client_that_subscribes_to_a_pattern_is_no_subscriber_of_a_job(redis_url: str, queue: str) -> None:
    # An operator who watches all jobs with PSUBSCRIBE must not keep alive the jobs of clients that have gone.
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        _, attempt = await start(client, worker)
        async with worker.redis.pubsub() as pubsub:
            await pubsub.psubscribe("llamaq:*:tokens:*")
            await pubsub.get_message(timeout=60)
            assert (await attempt.emit([], "")).listeners == 0
            assert (await attempt.emit([1], "a")).listeners == 0


# finish


async def test_a_finish_sent_twice_ends_the_job_once(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        last = attempt.increment([1], "a")
        async with worker.redis.pubsub() as pubsub:
            await pubsub.subscribe(client.keys.of_job(job.id).channel)
            await pubsub.get_message(timeout=60)
            for code in ("ok", "lost"):
                assert (await worker.scripts.finish(last, terminal_write())).code == code
            await worker.redis.publish(
                client.keys.of_job(job.id).channel, codec.encode_event(Failed(code="x", message=""))
            )
            messages = [await pubsub.get_message(timeout=60) for _ in range(3)]
        kinds = [codec.decode_event(message["data"]).type for message in messages if message]
        assert kinds == ["tokens", "finished", "failed"], "the second call published nothing before the marker"
        assert await worker.redis.xlen(attempt.claim.stream) == 0
        assert (await worker.redis.xpending(attempt.claim.stream, GROUP))["pending"] == 0


async def test_a_worker_with_the_number_of_the_newest_attempt_that_has_not_claimed_the_job_cannot_end_it(
    redis_url: str, queue: str
) -> None:
    # After a failover that lost the claim of worker "fake", another worker may have the same attempt number.
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await worker.redis.hset(client.keys.of_job(job.id).job, "worker", "living")
        assert not await attempt.finish(tokens=[1], text="stale")
        assert not await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        assert (await job.status()).state is JobState.RUNNING
        living = FakeAttemptScripts(worker.redis, worker.keys, "living")
        assert (await living.finish(attempt.increment(), terminal_write())).code == "ok"


async def test_a_job_that_ends_before_its_first_flush_has_started(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        claim = await worker.claim()
        assert claim is not None
        claimed = await worker.claim_scripts.claim_job(claim, "fake", LEASE_MS)
        assert isinstance(claimed, Attempt)
        assert (await job.status()).started_ms is None
        await FakeAttempt(worker, claim, claimed).finish(tokens=[1], text="a")
        status = await job.status()
        assert status.started_ms is not None
        assert (status.state, status.generated_tokens) == (JobState.FINISHED, 1)


async def test_all_keys_of_an_ended_job_expire_together(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=100) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker, idempotency_key="k")
        keys = client.keys.of_job(job.id)
        owned = [keys.job, client.keys.idempotency(queue, 0, "k")]
        assert [await worker.redis.pttl(key) for key in (*owned, keys.events)] == [-1, -1, -1]
        await attempt.finish()
        for key in owned:
            assert 90_000 < await worker.redis.pttl(key) <= 100_000
        assert not await worker.redis.exists(keys.events), "the output has all tokens"


async def test_a_finished_job_of_500_streamed_tokens_takes_at_most_3_kib(redis_server: Any, queue: str) -> None:
    url = redis_server.url  # the fake server does not measure memory
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:
        job, attempt = await start(client, worker)
        draw = random.Random(1)
        words = [draw.choice(["once", "upon", "a", "time", "there", "was", "river"]) for _ in range(100)]
        for _ in range(500):
            assert (await attempt.emit([draw.randrange(2048)], draw.choice(words)[:2])).code == "ok"
        await attempt.finish()
        keys = [key async for key in worker.redis.scan_iter(f"*{job.id}*")]
        assert keys == [client.keys.of_job(job.id).job.encode()]
        for _ in range(64):  # Redis moves a hash to a smaller table step by step, one step in each lookup
            await worker.redis.hget(keys[0], "status")
        sizes: list[Any] = [await worker.redis.memory_usage(key, samples=0) for key in keys]
        fields: Any = await worker.redis.hgetall(keys[0])
        assert sum(sizes) <= 3 * 1024, {name: len(value) for name, value in fields.items()}
        result = await client.job(job.id).result()
        assert (list(result.tokens), result.text) == (attempt.tokens, attempt.text)


async def test_events_are_kept_after_the_end_for_event_ttl_s(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, event_ttl_s=50) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await attempt.emit([1], "a")
        await attempt.finish(tokens=[2], text="b")
        assert [e.type for e in await stored_events(worker, job.id)] == ["started", "tokens", "tokens", "finished"]
        assert 40_000 < await worker.redis.pttl(client.keys.of_job(job.id).events) <= 50_000


async def test_the_request_of_a_finished_job_is_deleted_and_seed_and_metadata_stay(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        finished, attempt = await start(client, worker, seed=7, metadata={"user": "u"})
        await attempt.finish(tokens=[1], text="a")
        assert await field(worker, finished.id, "request") is None
        result = await client.job(finished.id).result()
        assert (result.seed, result.metadata) == (7, {"user": "u"})
        failed, attempt = await start(client, worker)
        await attempt.fail()
        assert await field(worker, failed.id, "request") is not None, "a failed job can be retried"


async def test_the_error_of_a_failed_job_is_stored(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await start(client, worker)
        await attempt.fail("invalid_grammar", "no rule is called root")
        status = await job.status()
        assert status.state is JobState.FAILED
        assert status.error == Failed(code="invalid_grammar", message="no rule is called root")


async def test_of_several_jobs_that_end_together_a_damaged_one_affects_no_other(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = [await client.submit("hello") for _ in range(4)]
        attempts = [await worker.start_next() for _ in jobs]
        await worker.redis.set(worker.keys.of_job(jobs[1].id).job, "not a hash")
        await worker.claim_scripts.claim_job(attempts[2].claim, "another", LEASE_MS)
        ends = [(attempt.increment(), terminal_write()) for attempt in attempts]
        outcomes = await worker.scripts.finish_jobs(ends)
        assert [outcome.code for outcome in outcomes if isinstance(outcome, FinishReply)] == ["ok", "lost", "ok"]
        assert isinstance(outcomes[1], ResponseError)
        assert [(await job.status()).state for job in (jobs[0], jobs[2], jobs[3])] == ["finished", "queued", "finished"]
        counted: Any = await worker.redis.hget(worker.keys.metrics(queue, 0), "interactive:finished:stop")
        assert counted == b"2", "the metrics of a call are stored together, and each job counts once"
        again = await worker.scripts.finish_jobs([ends[0], ends[3]])
        assert again == [FinishReply("lost"), FinishReply("lost")]
        assert await worker.redis.hget(worker.keys.metrics(queue, 0), "interactive:finished:stop") == b"2"
