"""Serves the metrics of this worker itself, at `--metrics-port`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from llamaq.common.metrics.metric_definitions import Samples
from llamaq.common.metrics.optional_server import server_class
from llamaq.common.metrics.worker_samples import add_worker
from llamaq.common.protocol.queue_and_worker_state import Worker
from llamaq.worker.settings import WorkerSettings


def bind_metrics_server(
    settings: WorkerSettings, describe: Callable[[int], Worker], is_alive: Callable[[], bool]
) -> AbstractContextManager[object]:
    """Return a context in which the metrics are served. Without `metrics_port`, it does nothing.

    The values are those of the heartbeat. Their names are the names that `llamaq metrics` uses. The engine thread only
    counts; a scrape runs on a thread of the server.

    Args:
        settings: The settings of the worker.
        describe: Returns the state of the worker at a time in milliseconds since the epoch.
        is_alive: Returns whether the engine runs ticks, for `/health`.

    Raises:
        MissingExtra: `llamaq[metrics]` is not installed.
        InvalidSettings: The port cannot be used.
    """
    if settings.metrics_port is None:
        return nullcontext()

    def read() -> Samples:
        samples, now_ms = Samples(), int(time.time() * 1000)
        add_worker(samples, describe(now_ms), now_ms)
        return samples

    server = server_class("llamaq worker --metrics-port")
    return server(read, is_alive, port=settings.metrics_port, bind=settings.metrics_bind)
