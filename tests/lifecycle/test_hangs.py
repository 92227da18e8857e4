"""An engine that hangs loses its jobs and is replaced; one that is merely slow keeps them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from llamaq.common.protocol.job_events import Started
from llamaq.producer import Job

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Reader

    Read = Callable[[Job], Reader]

PROMPT = "Once upon a time"
HANG_S = 1.0
LEASE_S = 1.0
SLACK_S = 4.0
"""Allows for the search for lost jobs, for the liveness pipe, and for a busy machine."""

TROUBLED = """
import ctypes
import time
from pathlib import Path

from llamaq.worker.engine.engine import Engine
from paced import Paced as Troubled

ORDERS = Path("orders")
run = Engine.run

def troubled(self, batch):
    if batch and ORDERS.exists():
        order, _, later = ORDERS.read_text().partition(" ")
        if later:
            ORDERS.write_text(later)
        else:
            ORDERS.unlink()
        if order == "stuck":
            ctypes.PyDLL(None).sleep(3600)
        time.sleep(3600 if order == "hang" else float(order))
    return run(self, batch)

Engine.run = troubled
"""
"""The file `orders` has one word for each of the next ticks: the seconds to sleep; `hang`, which sleeps without the
interpreter's lock, as llama_decode runs; or `stuck`, which sleeps and holds the lock."""


def start_troubled(environment: Environment, *, supervised: bool = False) -> Command:
    (environment.folder / "troubled.py").write_text(TROUBLED)
    return environment.start_worker(
        supervised=supervised, LLAMAQ_BATCH_STRATEGY="troubled:Troubled", LLAMAQ_HANG_S=str(HANG_S)
    )


def order(environment: Environment, *words: str) -> None:
    written = environment.folder / "orders.new"
    written.write_text(" ".join(words))
    written.rename(environment.folder / "orders")


def workers_of(environment: Environment, job: Job) -> list[str]:
    """Return the workers that started the job, in order."""
    return [event.worker for event in environment.events_of(job) if isinstance(event, Started)]


def test_a_worker_whose_engine_hangs_loses_its_jobs_to_another(environment: Environment, read: Read) -> None:
    first = start_troubled(environment)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1900, ignore_eos=True))
        reader.await_tokens(10)
        second = environment.start_worker()
        order(environment, "hang")
        ordered_s = time.monotonic()
        while reader.job.status().worker != second.worker_id:
            time.sleep(0.02)
        took_s = time.monotonic() - ordered_s
        print(f"hang to the next attempt: {took_s:.2f} s")  # noqa: T201  # a figure for `pytest -s`
        assert HANG_S < took_s < HANG_S + LEASE_S + SLACK_S
        first.await_output("job.lost")
        while [worker.card.worker for worker in client.workers()] != [second.worker_id]:  # no more liveness beats
            time.sleep(0.02)
        reader.await_tokens(reader.n_tokens + 10)
        reader.job.cancel()
        reader.finish()
        assert workers_of(environment, reader.job) == [first.worker_id, second.worker_id]
    first.signal(signal.SIGKILL)


def test_a_worker_whose_ticks_are_merely_slow_keeps_its_jobs(environment: Environment, read: Read) -> None:
    first = start_troubled(environment)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1900, ignore_eos=True))
        reader.await_tokens(5)
        environment.start_worker()  # claims the job if its lease expires
        order(environment, "0.8", "2.5", "0.0")  # longer than hang_s and the lease, and less than four of the slowest
        while (environment.folder / "orders").exists():
            time.sleep(0.02)
        reader.await_tokens(reader.n_tokens + 5)
        reader.job.cancel()
        reader.finish()
        assert workers_of(environment, reader.job) == [first.worker_id]


@pytest.mark.parametrize("what", ["hang", "stuck"])
def test_a_child_whose_engine_hangs_is_killed_and_another_goes_on(
    environment: Environment, read: Read, what: str
) -> None:
    supervisor = start_troubled(environment, supervised=True)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=200, ignore_eos=True))
        reader.await_tokens(10)
        order(environment, what)
        ordered_s = time.monotonic()
        supervisor.await_output("child.hung")
        hung_s = time.monotonic() - ordered_s
        supervisor.await_output("worker.ready", 2)
        ready_s = time.monotonic() - ordered_s
        assert len(reader.finish().tokens) == 200
        print(f"{what}: killed after {hung_s:.2f} s, ready after {ready_s:.2f} s")  # noqa: T201  # figures
        assert HANG_S < hung_s < HANG_S + SLACK_S
        one, other = workers_of(environment, reader.job)
        assert one != other
        supervisor.signal(signal.SIGTERM)
        assert supervisor.end() == 0
