"""Puts dead letters into a queue."""

from __future__ import annotations

from typing import Any

from tests.support.crashes import FOREVER_MS
from tests.support.job_claims import claims_of
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.keys import JobId
from llamaq.producer import AsyncClient, JobState
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker


async def add_dead_letters(url: str, queue: str) -> list[str]:
    """Add one dead job and one entry that is not a job. Returns the ids of the two dead letters in this order."""
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:
        await add_dead_job(client, worker, "what kills")
        await add_garbage_entry(worker)
        return [letter.id for letter in reversed(await client.dead_letters())]


async def add_dead_job(client: AsyncClient, worker: FakeWorker, prompt: str = "poison", **options: Any) -> str:
    """Submit a job that generates two tokens and then crashes three workers. Returns its id."""
    job = await client.submit(prompt, **options)
    first = await worker.start_next()
    await first.emit([7, 8], "two tokens")
    await crash_workers(worker, first)
    assert (await job.status()).state is JobState.FAILED
    return job.id


async def crash_workers(worker: FakeWorker, attempt: FakeAttempt) -> None:
    """Crash three workers with the job of an attempt, so that the job becomes a dead letter."""
    await worker_scripts(worker).requeue(attempt.claim, attempt.number)
    for name in ("a", "b", "c"):
        await worker.claim_scripts.claim_job(attempt.claim, name, LEASE_MS)
        await worker_scripts(worker, "heir").check_crash(
            attempt.claim, last_worker=name, silent_ms=FOREVER_MS, dead_after_s=1, max_crashes=3
        )


async def add_garbage_entry(worker: FakeWorker) -> None:
    """Add a queue entry that is not a job, and let a worker claim it."""
    job_claims = claims_of(worker)
    await job_claims.open()
    await worker.redis.xadd(worker.keys.of_job(str(JobId.new(worker.queue))).bulk, {"id": "nonsense"})
    assert await job_claims.read(1) == []
    await job_claims.close()
