"""`llamaq bulk worker` as a process: its work-horse is killed, stopped and told to end in the middle of a run."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from rq import Queue
from tests.producer.rq.conftest import work
from tests.producer.rq.test_bulk_run_queue import MakeRun, expected, make_run, runs, texts
from tests.support.redis_servers import wait_until

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client
from llamaq.producer.bulk import BulkRun
from llamaq.producer.rq import BulkQueue, RunState, bulk_run_queue
from llamaq.producer.rq.library import send_command
from llamaq.producer.testing import serving

pytestmark = [pytest.mark.starts_processes, pytest.mark.usefixtures("llamaq_settings")]
__all__ = ["make_run", "runs"]  # fixtures

StartWorker = Callable[..., subprocess.Popen[bytes]]
N_ROWS = 200
LONG_STOP_S = 60.0
"""A cancel that waits for a dead RQ worker takes longer, and one that does not takes a tenth of it."""


class Pace:
    """Answers rows, each as `<PROMPT>`, and no more different rows than the test allows.

    So a run is in its middle until the test continues, however slow the machine is.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: float = 0
        self._answered: set[str] = set()

    def allow(self, n_rows: float) -> None:
        """Set the number of different rows that are answered in all."""
        with self._changed:
            self._allowed = n_rows
            self._changed.notify_all()

    def answer(self, request: JobRequest) -> list[str]:
        """Return the answer of a row, as soon as it is allowed. A row that was answered before is not counted again."""
        prompt = str(request.prompt)
        with self._changed:
            self._changed.wait_for(lambda: len(self._answered | {prompt}) <= self._allowed)
            self._answered.add(prompt)
        return [f"<{prompt}>"]


@pytest.fixture
def pace(redis_url: str, queue: str) -> Iterator[Pace]:
    """Serve the queue."""
    pace = Pace()
    with serving(redis_url, queue, pace.answer):
        yield pace
        pace.allow(math.inf)


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


def await_rows(runs: BulkQueue, run: BulkRun, pace: Pace, count: int) -> None:
    """Let this number of rows be answered, wait until they are done, and check that the run still runs."""
    pace.allow(count)
    wait_until(lambda: rows_done(runs, run) >= count, f"{count} rows", timeout_s=60)
    assert runs.status(run.run_id).state is RunState.RUNNING


def make_due(rq_queue: Queue, run: BulkRun) -> None:
    """Let the time of the next try of a run come."""
    rq_queue.connection.zadd(rq_queue.scheduled_job_registry.key, {run.run_id: 1}, xx=True)


@pytest.fixture
def late_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let RQ wait for `make_due` before it tries a run again, so that each test sees that a try is scheduled."""
    monkeypatch.setattr(bulk_run_queue, "FIRST_RETRY_S", bulk_run_queue.MAX_RETRY_S)


def horse_of(worker: subprocess.Popen[bytes]) -> int:
    """Return the process that executes the run."""
    return int(Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()[0])


def process_state(pid: int) -> str:
    """Return the letter of the state of a process: Z if it has ended, and its parent has not noticed it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def finish(runs: BulkQueue, run: BulkRun, rq_queue: Queue, pace: Pace) -> None:
    """Run a run to its end, and check that it has the answer of each row once."""
    pace.allow(math.inf)
    work(rq_queue)
    assert runs.status(run.run_id).state is RunState.COMPLETED
    assert texts(run) == expected(N_ROWS)


@pytest.mark.usefixtures("late_retries")
def test_a_run_survives_the_death_of_its_work_horse_and_of_its_rq_worker(
    runs: BulkQueue, make_run: MakeRun, start_worker: StartWorker, rq_queue: Queue, pace: Pace
) -> None:
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    first = start_worker()
    await_rows(runs, run, pace, 10)
    os.kill(horse_of(first), signal.SIGKILL)
    wait_until(lambda: runs.status(run.run_id).state is RunState.SCHEDULED, "a retry", timeout_s=60)
    status = runs.status(run.run_id)
    assert status.error == "the work-horse was killed (signal 9)"
    assert status.progress is not None
    make_due(rq_queue, run)
    await_rows(runs, run, pace, status.progress.rows_done + 10)
    first.kill()  # its work-horse notices it, and returns the run to the queue
    wait_until(lambda: runs.status(run.run_id).state is RunState.QUEUED, "the return", timeout_s=60)
    assert 20 <= len(texts(run)) < N_ROWS
    finish(runs, run, rq_queue, pace)


def test_cancel_stops_a_run_and_sigterm_returns_it_to_the_queue(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    redis_url: str,
    queue: str,
    pace: Pace,
) -> None:
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker()
    await_rows(runs, run, pace, 10)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    pace.allow(20)  # the row that is being answered ends too
    with Client(redis_url, queue) as client:
        wait_until(lambda: client.queue_depth().waiting == 0, "an empty queue", timeout_s=60)
    runs.submit(run)
    await_rows(runs, run, pace, 20)
    worker.terminate()
    assert worker.wait(60) == 0
    assert runs.status(run.run_id).state is RunState.QUEUED
    assert 20 <= len(texts(run)) < N_ROWS
    finish(runs, run, rq_queue, pace)


def test_a_run_whose_rq_worker_and_work_horse_are_dead_is_cancelled_soon_and_continues(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    pace: Pace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cancel waited `STOP_S` for the dead RQ worker."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", LONG_STOP_S)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker()
    await_rows(runs, run, pace, 10)
    horse = horse_of(worker)
    worker.kill()
    os.kill(horse, signal.SIGKILL)
    start_s = time.monotonic()
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    assert time.monotonic() - start_s < LONG_STOP_S
    runs.submit(run)
    finish(runs, run, rq_queue, pace)


@pytest.mark.usefixtures("late_retries")
def test_a_work_horse_ends_when_its_run_is_cancelled_and_its_rq_worker_does_not_react(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    pace: Pace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work-horse went on with the cancelled run, and wrote that its rows had failed because they were cancelled."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", 0.5)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker()
    await_rows(runs, run, pace, 10)
    worker.send_signal(signal.SIGSTOP)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    assert not run.error_file.read_text()
    runs.submit(run)
    worker.send_signal(signal.SIGCONT)  # its end of the earlier execution must not become that of the new one
    await_rows(runs, run, pace, 30)
    os.kill(horse_of(worker), signal.SIGKILL)  # RQ must not take this for the stop of the earlier execution
    wait_until(lambda: runs.status(run.run_id).state is RunState.SCHEDULED, "a retry", timeout_s=60)
    make_due(rq_queue, run)
    pace.allow(math.inf)
    wait_until(lambda: runs.status(run.run_id).state is RunState.COMPLETED, "the end", timeout_s=60)
    assert texts(run) == expected(N_ROWS)


def test_a_run_that_is_cancelled_while_its_processes_get_no_time_has_no_failed_rows(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    rq_queue: Queue,
    pace: Pace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work-horse saw its cancelled rows before it looked whether the run was cancelled: they had failed."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", 0.01)
    monkeypatch.setattr(bulk_run_queue, "WORK_HORSE_S", 0.01)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    worker = start_worker("from llamaq.producer.rq import work_horse_stop; work_horse_stop.CHECK_S = 1000\n")
    await_rows(runs, run, pace, 10)
    horse = horse_of(worker)
    worker.send_signal(signal.SIGSTOP)
    os.kill(horse, signal.SIGSTOP)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    os.kill(horse, signal.SIGCONT)
    wait_until(lambda: process_state(horse) == "Z" or run.error_file.read_text(), "the work-horse ends", timeout_s=60)
    assert not run.error_file.read_text()
    assert len(texts(run)) == 10
    worker.kill()
    runs.submit(run)
    finish(runs, run, rq_queue, pace)


def test_the_late_end_of_a_cancelled_run_is_not_that_of_the_run_that_continues_it(
    runs: BulkQueue,
    make_run: MakeRun,
    start_worker: StartWorker,
    pace: Pace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RQ wrote the end of the stopped execution when the run was submitted again: it was never continued."""
    monkeypatch.setattr(bulk_run_queue, "STOP_S", 0.5)
    run = make_run("a", N_ROWS, window=4)
    runs.submit(run)
    slow = tmp_path / "slow"
    os.mkfifo(slow)
    held: list[BinaryIO] = []

    def send_stop(*args: Any, **options: Any) -> None:
        send_command(*args, **options)
        held.append(slow.open("wb"))  # waits until the RQ worker has stopped its work-horse, and reads

    monkeypatch.setattr(bulk_run_queue, "send_command", send_stop)
    start_worker(
        "from llamaq.producer.rq import bulk_jobs\n"
        "cancel_rows = bulk_jobs.cancel_rows\n"
        f"bulk_jobs.cancel_rows = lambda *args: (open({str(slow)!r}).read(), cancel_rows(*args))\n"
    )
    await_rows(runs, run, pace, 10)
    assert runs.cancel(run.run_id).state is RunState.CANCELLED
    assert runs.submit(run).state is RunState.QUEUED
    held.pop().close()  # the RQ worker has waited for this before it writes the end
    pace.allow(math.inf)
    wait_until(lambda: runs.status(run.run_id).state is not RunState.QUEUED, "the start", timeout_s=60)
    wait_until(lambda: runs.status(run.run_id).state is not RunState.RUNNING, "the end", timeout_s=60)
    assert runs.status(run.run_id).state is RunState.COMPLETED
    assert texts(run) == expected(N_ROWS)
