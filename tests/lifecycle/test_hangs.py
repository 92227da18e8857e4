"""A worker whose engine hangs loses its jobs and is replaced. A worker with slow ticks keeps its jobs."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from llamaq.common.protocol.job_events import Started
from llamaq.producer import Job

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Read

PROMPT = "Once upon a time"
HANG_S = 1.0
LEASE_S = "3"
"""For both workers of a test in which only one may have the job. A busy machine delays the renewal of a lease."""
SLACK_S = 20.0
"""Extra time for the search for lost jobs, for the liveness pipe, and for a very busy machine."""

FAULTS_STRATEGY = """
import ctypes
import time
from pathlib import Path

from llamaq.worker.engine.engine import Engine
from paced import Paced as WithFaults

FAULTS = Path("faults")
run = Engine.run

def run_with_faults(self, batch):
    if batch and FAULTS.exists():
        fault, _, later = FAULTS.read_text().partition(" ")
        if later:
            FAULTS.write_text(later)
        else:
            FAULTS.unlink()
        if fault == "stuck":
            ctypes.PyDLL(None).sleep(3600)
        time.sleep(3600 if fault == "hang" else float(fault))
    return run(self, batch)

Engine.run = run_with_faults
"""
"""A strategy that disturbs ticks. The file `faults` has one word for each of the next ticks: a number of seconds to
sleep; `hang`, which sleeps forever without the GIL, like llama_decode; or `stuck`, which holds the GIL forever."""


def start_worker_with_faults(environment: Environment, *, supervised: bool = False, **variables: str) -> Command:
    (environment.folder / "faults_strategy.py").write_text(FAULTS_STRATEGY)
    own: Any = {"LLAMAQ_BATCH_STRATEGY": "faults_strategy:WithFaults", "LLAMAQ_HANG_S": str(HANG_S)}
    return environment.start_worker(supervised=supervised, **(own | variables))


def set_faults(environment: Environment, *words: str) -> None:
    """Disturb the next ticks of the worker. Each word is the fault of one tick."""
    written = environment.folder / "faults.new"
    written.write_text(" ".join(words))
    written.rename(environment.folder / "faults")


def workers_of(environment: Environment, job: Job) -> list[str]:
    """Return the workers that started the job, in order."""
    return [event.worker for event in environment.events_of(job) if isinstance(event, Started)]


def test_another_worker_continues_the_jobs_of_a_worker_whose_engine_hangs(environment: Environment, read: Read) -> None:
    first = start_worker_with_faults(environment, LLAMAQ_LEASE_S=LEASE_S)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1900, ignore_eos=True))
        reader.await_tokens(10)
        second = environment.start_worker(LLAMAQ_LEASE_S=LEASE_S)
        fault_s = time.monotonic()
        set_faults(environment, "hang")
        while reader.job.status().worker != second.worker_id:
            time.sleep(0.02)
        took_s = time.monotonic() - fault_s
        print(f"hang to the next attempt: {took_s:.2f} s")  # noqa: T201  # shown by `pytest -s`
        assert HANG_S < took_s < HANG_S + float(LEASE_S) + SLACK_S
        first.await_output("job.lost")
        # `workers` lists the first worker until its heartbeat expires.
        while [worker.card.worker for worker in client.workers()] != [second.worker_id]:
            time.sleep(0.02)
        reader.await_tokens(reader.n_tokens + 10)
        reader.job.cancel()
        reader.finish()
        assert workers_of(environment, reader.job) == [first.worker_id, second.worker_id]
    first.signal(signal.SIGKILL)


def test_a_worker_with_slow_ticks_keeps_its_jobs(environment: Environment, read: Read) -> None:
    first = start_worker_with_faults(environment, LLAMAQ_LEASE_S=LEASE_S, LLAMAQ_HANG_S="1.5")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1900, ignore_eos=True))
        reader.await_tokens(5)
        environment.start_worker(LLAMAQ_LEASE_S=LEASE_S)  # claims the job if its lease expires
        # The second tick takes longer than `hang_s` and than the lease. But a tick counts as hung only if it takes four
        # times as long as the slowest tick before it.
        set_faults(environment, "1.2", "4.0", "0.0")
        while (environment.folder / "faults").exists():
            time.sleep(0.02)
        reader.await_tokens(reader.n_tokens + 5)
        reader.job.cancel()
        reader.finish()
        assert workers_of(environment, reader.job) == [first.worker_id]


@pytest.mark.parametrize("fault", ["hang", "stuck"])
def test_the_supervisor_replaces_a_child_whose_engine_hangs_and_the_job_continues(
    environment: Environment, read: Read, fault: str
) -> None:
    supervisor = start_worker_with_faults(environment, supervised=True, LINGER_TOKENS="100")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=200, ignore_eos=True))
        reader.await_tokens(10)
        fault_s = time.monotonic()
        set_faults(environment, fault)
        supervisor.await_output("child.hung")
        hung_s = time.monotonic() - fault_s
        environment.let_jobs_finish()
        supervisor.await_output("worker.ready", 2)
        ready_s = time.monotonic() - fault_s
        assert len(reader.finish().tokens) == 200
        print(f"{fault}: killed after {hung_s:.2f} s, ready after {ready_s:.2f} s")  # noqa: T201  # figures
        assert HANG_S < hung_s < HANG_S + SLACK_S
        one, other = workers_of(environment, reader.job)
        assert one != other
        supervisor.signal(signal.SIGTERM)
        assert supervisor.end() == 0
