"""Redis is killed under load with `appendfsync always`: every acknowledged job is still stored, and finishes."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from redis.exceptions import RedisError
from tests.support.ports import HOST, reserve_port
from tests.support.redis_servers import Server, wait_until

from llamaq.producer import Client, Job, QueueFull

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

N_KILLS = 3
SUBMITTERS = 3
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


class Submitter(threading.Thread):
    """A thread that submits jobs, even while Redis is down, and records the acknowledged jobs."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._stopping = threading.Event()
        self.jobs: list[Job] = []
        self.start()

    def run(self) -> None:
        while not self._stopping.wait(0.02):
            try:
                self.jobs.append(self._client.submit("Once upon a time", max_tokens=4))
            except (RedisError, OSError, QueueFull):
                continue

    def stop(self) -> list[Job]:
        self._stopping.set()
        self.join()
        return self.jobs


def n_acknowledged(submitters: list[Submitter]) -> int:
    return sum(len(submitter.jobs) for submitter in submitters)


def test_every_acknowledged_job_finishes_although_redis_is_killed_under_load(
    environment: Environment, folder: Path
) -> None:
    server = Server(folder, reserve_port(), DURABLE)
    server.start()
    environment.redis_url = f"redis://{HOST}:{server.port}/0"
    try:
        environment.start_worker("--n-parallel", "8")
        dice = random.Random(3)
        with environment.client() as client:
            submitters = [Submitter(client) for _ in range(SUBMITTERS)]
            for _ in range(N_KILLS):
                n_before = n_acknowledged(submitters)
                time.sleep(dice.uniform(0.3, 0.8))
                wait_until(lambda: n_acknowledged(submitters) > n_before + 10, "further jobs are acknowledged")  # noqa: B023
                server.kill()
                server.start()
            time.sleep(0.3)
            jobs = [job for submitter in submitters for job in submitter.stop()]
            assert len({job.id for job in jobs}) == len(jobs) > 10 * N_KILLS
            for job in jobs:
                assert job.result().tokens
                environment.events_of(job)
        environment.end_commands()
    finally:
        server.kill()
