"""The script calls that only real workers need, for the jobs of a fake one."""

from __future__ import annotations

from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.worker_scripts import WorkerScripts


def worker_scripts(worker: FakeWorker) -> WorkerScripts:
    """Return the calls with the connection and the keys of a fake worker."""
    return WorkerScripts(worker.redis, worker.keys)
