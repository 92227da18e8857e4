"""Jobs that a fake worker has started, and the fields of their hashes."""

from __future__ import annotations

from typing import Any

from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import FakeAttempt, FakeWorker


async def start(client: AsyncClient, worker: FakeWorker, **options: Any) -> tuple[AsyncJob, FakeAttempt]:
    """Submit a job with these options, and start it on the fake worker."""
    job = await client.submit("hello", **options)
    return job, await worker.start_next()


async def field(worker: FakeWorker, job_id: str, name: str) -> bytes | None:
    """Return a field of the job's hash. None: it is missing."""
    value: Any = await worker.redis.hget(worker.keys.of_job(job_id).job, name)
    return value if isinstance(value, bytes) else None
