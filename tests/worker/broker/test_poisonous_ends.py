"""Jobs that crash workers, on a real Redis: how such a job fails, and what ends otherwise."""

from __future__ import annotations

import time

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.crashes import LEASE_S, begin, check_crash, crash_worker, crashes, open_job_claims, submit

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol import codec
from llamaq.common.protocol.attempt_scripts import DEAD_TTL_S
from llamaq.common.protocol.job_events import Finished
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_types import TerminalWrite
from llamaq.producer import AsyncClient, JobFailed
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.engine_loop.telemetry import EndedJob
from llamaq.worker.local.embedded_redis import EmbeddedRedis

EXPIRED_IDLE_MS = 10**11
"""The idle time of an entry whose lease has expired; see `_lib.lua`."""


async def test_after_three_crashes_a_job_fails_once_and_is_a_dead_letter(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker, idempotency_key="key")
        assert [await crash_worker(worker, claim, name) for name in ("a", "b")] == ["ok", "suspect"]
        await begin(worker, claim, "c")
        ended: list[EndedJob] = []
        job_claims = await open_job_claims(worker, ended)
        assert [await job_claims.check_crash(claim) for _ in range(2)] == ["dead", "ok"]
        await job_claims.close()
        assert [(one.job_id, one.error_code) for one in ended] == [(job.id, "poison")]
        keys = client.keys.of_job(job.id)

        with pytest.raises(JobFailed, match="3 workers died with this job") as caught:
            await job.result(timeout=60)
        assert caught.value.code == ErrorCode.POISON
        assert caught.value.message.endswith(": a b c")
        status = await job.status()
        assert (status.state, status.crashes, status.attempt) == (JobState.FAILED, 3, 3)
        (letter,) = await client.dead_letters()
        assert (letter.job_id, letter.workers, letter.reason) == (job.id, ("a", "b", "c"), caught.value.message)

        assert await worker.redis.xlen(claim.stream) == 0
        assert (await worker.redis.xpending(claim.stream, GROUP))["pending"] == 0
        assert await check_crash(worker, claim, "c") == "ok"
        assert await worker.claim_scripts.claim_job(claim, "successor", LEASE_MS) == "done"
        assert (DEAD_TTL_S - 60) * 1000 < await worker.redis.pttl(keys.job) <= DEAD_TTL_S * 1000
        assert 0 < await worker.redis.pttl(client.keys.idempotency(queue, 0, "key")) <= 60_000


async def test_a_result_ttl_longer_than_that_of_dead_letters_is_kept(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue, result_ttl_s=3 * DEAD_TTL_S) as client,
        FakeWorker(redis_url, queue) as worker,
    ):
        job, claim = await submit(client, worker)
        for name in ("a", "b", "c"):
            await crash_worker(worker, claim, name)
        assert await worker.redis.ttl(client.keys.of_job(job.id).job) > 2 * DEAD_TTL_S


@pytest.mark.parametrize(
    ("max_crashes", "codes"),
    [
        (1, ["suspect", "dead"]),
        (2, ["suspect", "dead"]),
        (3, ["ok", "suspect", "dead"]),
        (5, ["ok", "ok", "ok", "suspect", "dead"]),
    ],
)
async def test_a_job_fails_only_after_one_attempt_as_a_suspect(
    redis_url: str, queue: str, max_crashes: int, codes: list[str]
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        _, claim = await submit(client, worker)
        assert [await crash_worker(worker, claim, f"w{n}", max_crashes=max_crashes) for n in range(len(codes))] == codes


async def test_a_cancelled_job_ends_as_cancelled_and_not_as_poison(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        for name in ("a", "b"):
            await crash_worker(worker, claim, name)
        await begin(worker, claim, "c")
        await job.cancel()
        assert await check_crash(worker, claim, "c") == "ok"
        assert await worker.claim_scripts.claim_job(claim, "successor", LEASE_MS) == "ended"
        assert (await job.result(timeout=60)).finish_reason is FinishReason.CANCELLED
        assert await client.dead_letters() == ()


async def test_a_suspect_whose_last_worker_may_be_alive_is_cancelled_at_once(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job_claims = await open_job_claims(worker)
        job, claim = await submit(client, worker)
        for name in ("a", "b"):
            await crash_worker(worker, claim, name)
        attempt = await begin(worker, claim, worker.name)
        await worker.announce(now_ms=int((time.time() - LEASE_S * 0.7) * 1000))
        idle_ms = EXPIRED_IDLE_MS - LEASE_MS  # as reclaim.lua leaves an entry whose lease had expired
        await worker.redis.xclaim(claim.stream, GROUP, "waiting", 0, [claim.entry_id], idle=idle_ms, justid=True)
        assert await job_claims.check_crash(claim) == "unsure"
        await job.cancel()
        assert (await job.result(timeout=60)).finish_reason is FinishReason.CANCELLED
        assert (await attempt.emit([1], "a")).code == "lost"


async def test_a_suspect_that_finishes_is_not_a_dead_letter(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        for name in ("a", "b"):
            await crash_worker(worker, claim, name)
        attempt = await begin(worker, claim, "c")
        event = Finished(finish_reason=FinishReason.STOP, stats=JobStats())
        ending = TerminalWrite(event, {"finish_reason": "stop", "output": codec.encode_output("", [])})
        assert (await attempt.worker.scripts.finish(attempt.increment(), ending)).code == "ok"
        assert (await job.result(timeout=60)).finish_reason is FinishReason.STOP
        assert await client.dead_letters() == ()


@pytest.mark.starts_processes
async def test_a_job_is_claimed_although_redis_is_full(queue: str) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client, FakeWorker(server.url, queue) as worker:
            job_claims = await open_job_claims(worker)
            job, claim = await submit(client, worker)
            await worker.redis.config_set("maxmemory", "1")
            assert await job_claims.claim_job(claim) is not None
            assert (await job.status()).attempt == 1
            assert await worker.redis.xlen(Keys().dead(queue, 0)) == 0


async def test_a_death_does_not_count_while_the_heartbeats_cannot_be_read(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, the list of workers may be on a node that is away."""

    async def fail(**_: object) -> int:
        raise RedisConnectionError("the node is away")

    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await submit(client, worker)
        await begin(worker, claim, "first")
        job_claims = await open_job_claims(worker)
        monkeypatch.setattr(job_claims._crash_check, "_beat_age", fail)
        assert await job_claims.check_crash(claim) == "ok"
        assert await crashes(job) == 0
        await job_claims.close()
