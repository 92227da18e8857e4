"""`llamaq health`, as a container asks it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

MAX_AGE_S = 3.0
"""More than a heartbeat and an idle engine's second together."""


def test_health_is_green_while_the_worker_ticks_and_red_when_it_does_not(environment: Environment) -> None:
    options = ["--queue", environment.queue, "--redis-url", environment.redis_url, "--max-age-s", str(MAX_AGE_S)]

    def health() -> int:
        return environment.start("health", *options).end()

    assert health() == 1, "no worker serves the queue"
    worker = environment.start_worker(LLAMAQ_HEARTBEAT_S="0.2")
    assert health() == 0
    time.sleep(1.1 * MAX_AGE_S)
    assert health() == 0, "an idle engine ticks too"
    os.kill(worker.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    while health() == 0:
        assert time.monotonic() - stopped_s < 10 * MAX_AGE_S
    os.kill(worker.pid, signal.SIGCONT)
