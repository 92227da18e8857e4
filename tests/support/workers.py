"""What the only worker of a queue reports."""

from __future__ import annotations

import time

from llamaq.common.protocol.queue_and_worker_state import Worker
from llamaq.producer import Client

TIMEOUT_S = 60.0


def only_worker(client: Client) -> Worker:
    """Return the last heartbeat of the queue's only worker.

    On a busy machine, a heartbeat can be so late that the last one has expired. Then this function waits for the next.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (workers := client.workers()):
        assert time.monotonic() < deadline_s, f"no heartbeat of a worker within {TIMEOUT_S:g} s"
        time.sleep(0.05)
    (worker,) = workers
    return worker
