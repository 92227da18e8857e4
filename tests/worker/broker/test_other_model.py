"""Tokens of two models are never mixed in one job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.job_claims import claims_of
from tests.support.reclaims import reclaim
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_suspects import FOREVER

from llamaq.common.errors import JobFailed
from llamaq.common.protocol.script_types import Claimant, JobEntry
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.queries.job_records import read_output
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.broker.job_claims import ClaimedJob, JobClaims


@asynccontextmanager
async def model(worker: FakeWorker, name: str, *, restart: bool = False) -> AsyncIterator[JobClaims]:
    """Yield the claims of a worker with this model."""
    job_claims = claims_of(worker, Claimant(worker.name, LEASE_MS, name, restart))
    await job_claims.open()
    try:
        yield job_claims
    finally:
        await job_claims.close()


async def begin(client: AsyncClient, worker: FakeWorker, n_tokens: int, **options: Any) -> tuple[AsyncJob, JobEntry]:
    """Let the model `first` generate tokens of a new job. Then its worker requeues the job."""
    job = await client.submit("hello", **options)
    async with model(worker, "first") as claims:
        claim = await worker.claim()
        assert claim is not None
        claimed = await claims.claim_job(claim)
        assert claimed is not None
        if n_tokens:
            await _store(worker, claimed, n_tokens)
        await worker_scripts(worker).requeue(claim, claimed.attempt.number)
    return job, claim


async def _store(worker: FakeWorker, claimed: ClaimedJob, n_tokens: int) -> None:
    attempt = FakeAttempt(worker, claimed.entry, claimed.attempt)
    await attempt.emit(list(range(n_tokens)), "x" * n_tokens)


async def test_a_job_with_tokens_waits_for_a_worker_with_its_model(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        _, claim = await begin(client, worker, 3)
        async with model(worker, "second") as second, model(worker, "first") as first:
            assert await second.claim_job(claim) is None
            taken = await reclaim(worker, claim.stream, 1, 1000, trusted_until_ms=FOREVER)
            assert taken == [], "the entry cannot be taken again at once"
            continued = await first.claim_job(claim)
            assert continued is not None
            assert continued.published.tokens == (0, 1, 2)


async def test_a_job_without_tokens_runs_on_any_model(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await begin(client, worker, 0)
        async with model(worker, "second") as second:
            assert await second.claim_job(claim) is not None
        assert await worker.redis.hget(worker.keys.of_job(job.id).job, "model") == b"second"


async def test_with_restart_a_job_without_a_stream_starts_again_on_another_model(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await begin(client, worker, 3, stream=False)
        async with model(worker, "second", restart=True) as second:
            claimed = await second.claim_job(claim)
            assert claimed is not None
            assert (claimed.attempt.generated, claimed.published.tokens) == (0, ())
            await _store(worker, claimed, 2)
        assert (await job.status()).generated_tokens == 2
        output = await read_output(worker.redis, worker.keys.of_job(job.id))
        assert (tuple(output.tokens), output.text) == ((0, 1), "xx")


async def test_with_restart_a_job_with_published_tokens_fails(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, claim = await begin(client, worker, 3)
        async with model(worker, "second", restart=True) as second:
            assert await second.claim_job(claim) is None
        with pytest.raises(JobFailed) as failed:
            await job.result(timeout=10)
        assert failed.value.code == "other_model"
