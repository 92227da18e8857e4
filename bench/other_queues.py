"""The workers of RQ and of a plain Redis Stream. Run as a script, each prints its seconds and its processor seconds.

Usage: python bench/other_queues.py rq|rq_simple|stream REDIS_URL N_JOBS
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import redis
import rq

STREAM, GROUP = "bench", "workers"
BLOCK = 32
"""Entries of the stream in one reply."""


def echo(value: int) -> int:
    """Be the job of RQ."""
    return value


def work_rq(url: str, worker_class: type[rq.Worker]) -> None:
    """Run all jobs of RQ's queue."""
    logging.getLogger("rq").setLevel(logging.ERROR)
    connection = redis.Redis.from_url(url)
    worker_class([rq.Queue(connection=connection)], connection=connection).work(burst=True, logging_level="ERROR")


def work_stream(url: str, n_jobs: int) -> None:
    """Read, acknowledge and delete the entries of the stream."""
    client = redis.Redis.from_url(url)
    while n_jobs:
        reply: Any = client.xreadgroup(GROUP, "me", {STREAM: ">"}, count=BLOCK)
        ((_, entries),) = reply
        ids = [entry_id for entry_id, _ in entries]
        with client.pipeline(transaction=True) as pipe:
            pipe.xack(STREAM, GROUP, *ids)
            pipe.xdel(STREAM, *ids)
            pipe.execute()
        n_jobs -= len(ids)


def time_worker(kind: str, url: str, n_jobs: int) -> tuple[float, float]:
    """Run a worker process until it has taken all jobs.

    Returns:
        The seconds that the worker needed after the import of its modules, and the processor seconds of this time.
    """
    folder = Path(__file__).resolve().parent
    command = [sys.executable, __file__, kind, url, str(n_jobs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, used_s = done.stdout.splitlines()[-1].split()
    return float(seconds), float(used_s)


def main(kind: str, url: str, n_jobs: int) -> None:
    """Run one worker until it has taken all jobs."""
    started_s, used_s = time.perf_counter(), _cpu_s()
    if kind == "stream":
        work_stream(url, n_jobs)
    else:
        work_rq(url, rq.SimpleWorker if kind == "rq_simple" else rq.Worker)
    print(time.perf_counter() - started_s, _cpu_s() - used_s)


def _cpu_s() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
