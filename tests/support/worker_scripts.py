"""The script calls that only real workers need, for the jobs of a fake one."""

from __future__ import annotations

from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.worker_scripts import WorkerScripts


def worker_scripts(worker: FakeWorker, name: str | None = None) -> WorkerScripts:
    """Return the calls with the connection and the keys of a fake worker, made by it or by the worker `name`."""
    return WorkerScripts(worker.redis, worker.keys, name or worker.name)
