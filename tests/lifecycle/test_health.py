"""`llamaq health`, called as the health check of a container calls it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from llamaq.cli.exit_codes import EXIT_NO_ANSWER

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

IDLE_AGE_S = 4.5
"""Longer than a heartbeat interval, the one second between two ticks of an idle engine, and a stop of the machine
together."""
STOPPED_AGE_S = 1.5
"""Longer than a heartbeat interval and that second."""


def test_health_succeeds_while_the_worker_ticks_and_fails_when_it_stops(environment: Environment) -> None:
    options = ["--queue", environment.queue, "--redis-url", environment.redis_url]

    def health(max_age_s: float) -> int:
        return environment.start("health", *options, "--max-age-s", str(max_age_s)).end()

    assert health(IDLE_AGE_S) == EXIT_NO_ANSWER, "a queue without a worker is healthy"
    worker = environment.start_worker(LLAMAQ_HEARTBEAT_S="0.2")
    assert health(IDLE_AGE_S) == 0
    time.sleep(1.1 * IDLE_AGE_S)
    assert health(IDLE_AGE_S) == 0, "an idle worker is not healthy"
    os.kill(worker.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    time.sleep(STOPPED_AGE_S)
    while health(STOPPED_AGE_S) == 0:
        assert time.monotonic() - stopped_s < 30
    os.kill(worker.pid, signal.SIGCONT)
