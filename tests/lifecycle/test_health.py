"""`llamaq health`, called as the health check of a container calls it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from llamaq.cli.exit_codes import EXIT_NO_ANSWER

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

MAX_AGE_S = 3.0
"""Longer than a heartbeat interval, the one second between two ticks of an idle engine, and a short stop of the machine
together."""


def test_health_succeeds_while_the_worker_ticks_and_fails_when_it_stops(environment: Environment) -> None:
    options = ["--queue", environment.queue, "--redis-url", environment.redis_url, "--max-age-s", str(MAX_AGE_S)]

    def health() -> int:
        return environment.start("health", *options).end()

    assert health() == EXIT_NO_ANSWER, "a queue without a worker is healthy"
    worker = environment.start_worker(LLAMAQ_HEARTBEAT_S="0.2")
    assert health() == 0
    time.sleep(1.1 * MAX_AGE_S)
    assert health() == 0, "an idle worker is not healthy"
    os.kill(worker.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    time.sleep(MAX_AGE_S)
    while health() == 0:
        assert time.monotonic() - stopped_s < 10 * MAX_AGE_S
    os.kill(worker.pid, signal.SIGCONT)
