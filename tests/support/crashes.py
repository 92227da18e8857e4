"""Lets fake workers crash with a job, on a real Redis."""

from __future__ import annotations

import copy
from typing import Any

from tests.support.job_claims import claims_of
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.script_types import Claimant, JobEntry
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeAttemptScripts, FakeWorker
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.worker_scripts import CrashVerdict
from llamaq.worker.engine_loop.telemetry import EndedJob

LEASE_S = LEASE_MS / 1000
FOREVER_MS = 10**12
"""The age of the last heartbeat of a worker that has none."""


async def begin(worker: FakeWorker, claim: JobEntry, name: str) -> FakeAttempt:
    named = copy.copy(worker)  # the copy shares the connections of the original
    named.name = name
    named.scripts = FakeAttemptScripts(worker.redis, worker.keys, name)
    attempt = await named.begin(claim)
    assert attempt is not None
    return attempt


async def check_crash(
    worker: FakeWorker, claim: JobEntry, last_worker: str, *, claimer: str = "successor", max_crashes: int = 3
) -> CrashVerdict:
    """Check for a crash, as the worker that reclaims the job does. `last_worker` no longer has a heartbeat."""
    return await worker_scripts(worker, claimer).check_crash(
        claim, last_worker=last_worker, silent_ms=FOREVER_MS, dead_after_s=LEASE_S / 2, max_crashes=max_crashes
    )


async def crash_worker(worker: FakeWorker, claim: JobEntry, name: str, *, max_crashes: int = 3) -> CrashVerdict:
    """Start the job on a worker with this name, let the worker die, and check for the crash."""
    await begin(worker, claim, name)
    return await check_crash(worker, claim, name, max_crashes=max_crashes)


async def submit(client: AsyncClient, worker: FakeWorker, **options: Any) -> tuple[AsyncJob, JobEntry]:
    job = await client.submit("hello", **options)
    claim = await worker.claim()
    assert claim is not None
    return job, claim


async def crashes(job: AsyncJob) -> int:
    return (await job.status()).crashes


async def open_job_claims(worker: FakeWorker, ended: list[EndedJob] | None = None) -> JobClaims:
    job_claims = claims_of(worker, Claimant("successor", LEASE_MS), ended=ended)
    await job_claims.open()
    return job_claims
