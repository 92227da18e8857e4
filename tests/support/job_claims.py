"""The queue and the claims of a worker, for tests that connect to Redis with a client or a fake worker."""

from __future__ import annotations

from llamaq.common.protocol.script_types import Claimant
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.engine_loop.telemetry import EndedJob


def worker_queue(connected: AsyncClient | FakeWorker, n_partitions: int = 1) -> WorkerQueue:
    """Return the queue of a client or of a fake worker, as a real worker uses it."""
    return WorkerQueue(connected.redis, connected.keys, connected.queue, n_partitions)


def claims_of(
    worker: FakeWorker,
    claimant: Claimant | None = None,
    *,
    max_crashes: int = 3,
    ended: list[EndedJob] | None = None,
) -> JobClaims:
    """Return the claims of a worker, which uses the connection of a fake one.

    Args:
        worker: The fake worker.
        claimant: The worker that claims. None: the fake worker.
        max_crashes: A job fails after this many crashes.
        ended: Receives the jobs that end in the worker.
    """
    found: list[EndedJob] = [] if ended is None else ended
    return JobClaims(
        worker_queue(worker),
        claimant or Claimant(worker.name, LEASE_MS),
        max_crashes=max_crashes,
        on_finished=found.append,
    )
