"""`llamaq bulk worker` as a process: its work-horse is killed, stopped and told to end in the middle of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rq import Queue
from tests.producer.rq.conftest import work
from tests.producer.rq.test_bulk_run_queue import MakeRun, expected, make_run, runs, texts
from tests.support.redis_servers import wait_until

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client
from llamaq.producer.bulk import BulkRun
from llamaq.producer.rq import BulkQueue, RunState, bulk_run_queue
from llamaq.producer.testing import serving

pytestmark = [pytest.mark.starts_processes, pytest.mark.usefixtures("llamaq_settings")]
__all__ = ["make_run", "runs"]  # fixtures

StartWorker = Callable[..., subprocess.Popen[bytes]]
N_ROWS = 200
ROW_S = 0.02
LONG_STOP_S = 60.0
"""A cancel that waits for a dead RQ worker takes longer, and one that does not takes a tenth of it."""


@pytest.fixture
def hurry(redis_url: str, queue: str) -> Iterator[threading.Event]:
    """Serve the queue. Each row takes `ROW_S` seconds until this event is set."""
    hurry = threading.Event()

    def answer(request: JobRequest) -> list[str]:
        hurry.wait(ROW_S)
        return [f"<{request.prompt}>"]

    with serving(redis_url, queue, answer):
        yield hurry


@pytest.fixture
def start_worker(rq_queue: Queue, redis_url: str, tmp_path: Path) -> Iterator[StartWorker]:
    started: list[subprocess.Popen[bytes]] = []
    code = "import sys; from llamaq.cli.rq_bulk_commands import run_worker; run_worker(*sys.argv[1:3])"

    def start(change: str = "") -> subprocess.Popen[bytes]:
        with (tmp_path / "worker.log").open("ab") as log:
            command = [sys.executable, "-c", change + code, redis_url, rq_queue.name]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def rows_done(runs: BulkQueue, run: BulkRun) -> int:
    progress = runs.status(run.run_id).progress
    return progress.rows_done if progress is not None else 0


def await_rows(runs: BulkQueue, run: BulkRun, count: int) -> None:
    """Wait until this number of rows is done, and check that the run still runs."""
    wait_until(lambda: rows_done(runs, run) >= count, f"{count} rows", timeout_s=60)
    assert runs.status(run.run_id).state is RunState.RUNNING


def horse_of(worker: subprocess.Popen[bytes]) -> int:
    """Return the process that executes the run."""
    return int(Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()[0])


def finish(runs: BulkQueue, run: BulkRun, rq_queue: Queue, hurry: threading.Event) -> None:
    """Run a run to its end, and check that it has the answer of each row once."""
    hurry.set()
    work(rq_queue)
    assert runs.status(run.run_id).state is RunState.COMPLETED
    assert texts(run) == expected(N_ROWS)


def test_a_run_survives_the_death_of_its_work_horse_and_of_its_rq_worker(
    runs: BulkQueue, make_run: MakeRun, start_worker: StartWorker, rq_queue: Queue, hurry: threading.Event
) -> None:
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    first = start_worker()
    await_rows(runs, run, 10)
    os.kill(horse_of(first), signal.SIGKILL)
    wait_until(lambda: runs.status(run.run_id).state is RunState.SCHEDULED, "a retry", timeout_s=60)
    status = runs.status(run.run_id)
    assert status.error == "the work-horse was killed (signal 9)"
    assert status.progress is not None
    await_rows(runs, run, status.progress.rows_done + 10)
    first.kill()  # its work-horse notices it, and returns the run to the queue
    wait_until(lambda: runs.status(run.run_id).state is RunState.QUEUED, "the return", timeout_s=60)
    assert 20 <= len(texts(run)) < N_ROWS
    finish(runs, run, rq_queue, hurry)


def test_cancel_stops_a_run_and_sigterm_returns_it_to_the_queue(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    redis_url: str,
    queue: str,
    hurry: threading.Event,
) -> None:
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker()
    await_rows(runs, run, 10)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    with Client(redis_url, queue) as client:
        wait_until(lambda: client.queue_depth().waiting == 0, "an empty queue", timeout_s=60)
    runs.submit(run)
    await_rows(runs, run, 20)
    worker.terminate()
    assert worker.wait(60) == 0
    assert runs.status(run.run_id).state is RunState.QUEUED
    assert 20 <= len(texts(run)) < N_ROWS
    finish(runs, run, rq_queue, hurry)


def test_a_run_whose_rq_worker_and_work_horse_are_dead_is_cancelled_soon_and_continues(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    hurry: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cancel waited `STOP_S` for the dead RQ worker."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", LONG_STOP_S)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker()
    await_rows(runs, run, 10)
    horse = horse_of(worker)
    worker.kill()
    os.kill(horse, signal.SIGKILL)
    start_s = time.monotonic()
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    assert time.monotonic() - start_s < LONG_STOP_S
    runs.submit(run)
    finish(runs, run, rq_queue, hurry)


def test_a_work_horse_ends_when_its_run_is_cancelled_and_its_rq_worker_does_not_react(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    hurry: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work-horse went on with the cancelled run, and wrote that its rows had failed because they were cancelled."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", 0.5)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker()
    await_rows(runs, run, 10)
    worker.send_signal(signal.SIGSTOP)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    assert not run.error_file.read_text()
    runs.submit(run)
    worker.send_signal(signal.SIGCONT)  # its end of the earlier execution must not become that of the new one
    await_rows(runs, run, 30)
    os.kill(horse_of(worker), signal.SIGKILL)  # RQ must not take this for the stop of the earlier execution
    wait_until(lambda: runs.status(run.run_id).state is RunState.SCHEDULED, "a retry", timeout_s=60)
    hurry.set()
    wait_until(lambda: runs.status(run.run_id).state is RunState.COMPLETED, "the end", timeout_s=60)
    assert texts(run) == expected(N_ROWS)


def test_the_late_end_of_a_cancelled_run_is_not_that_of_the_run_that_continues_it(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    hurry: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RQ wrote the end of the stopped execution when the run was submitted again: it was never continued."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", 0.5)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    slow = tmp_path / "slow"
    os.mkfifo(slow)
    start_worker(
        "from llamaq.producer.rq import bulk_jobs\n"
        "cancel_rows = bulk_jobs.cancel_rows\n"
        f"bulk_jobs.cancel_rows = lambda *args: (open({str(slow)!r}).read(), cancel_rows(*args))\n"
    )
    await_rows(runs, run, 10)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    assert runs.submit(run).state is RunState.QUEUED
    slow.write_bytes(b"")  # the RQ worker has waited for this before it writes the end
    hurry.set()
    wait_until(lambda: runs.status(run.run_id).state is not RunState.QUEUED, "the start", timeout_s=60)
    wait_until(lambda: runs.status(run.run_id).state is not RunState.RUNNING, "the end", timeout_s=60)
    assert runs.status(run.run_id).state is RunState.COMPLETED
    assert texts(run) == expected(N_ROWS)
