"""Bulk runs as RQ jobs: submitted, followed, chained, scheduled, cancelled, and continued after errors."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, Worker
from rq.job import Job, JobStatus
from rq.registry import FinishedJobRegistry
from rq.serializers import DefaultSerializer, JSONSerializer
from tests.producer.rq.conftest import InProcessWorker, work

from llamaq.common.errors import InvalidRequest, InvalidSettings, MissingExtra
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client
from llamaq.producer.bulk import BulkProgress, BulkRun
from llamaq.producer.rq import BulkQueue, RunState, bulk_jobs, library
from llamaq.producer.rq.bulk_run_worker import BulkWorker
from llamaq.producer.rq.withdrawn_run import submit_time
from llamaq.producer.testing import FakeWorker, serving

pytestmark = pytest.mark.usefixtures("llamaq_settings")

MakeRun = Callable[..., BulkRun]


def echo(request: JobRequest) -> list[str]:
    return [f"<{request.prompt}>"]


@pytest.fixture
def worker(redis_url: str, queue: str) -> Iterator[None]:
    with serving(redis_url, queue, echo):
        yield


@pytest.fixture
def runs(rq_queue: Queue, redis_url: str) -> Iterator[BulkQueue]:
    with BulkQueue(redis_url, rq_queue.name) as runs:
        yield runs


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(run_id: str, n_rows: int = 3, **fields: Any) -> BulkRun:
        lines = [json.dumps({"id": f"r{n}", "prompt": f"p{n}"}) for n in range(n_rows)]
        (tmp_path / f"{run_id}.jsonl").write_text("\n".join(lines) + "\n")
        # A run id of its own in each test: all tests share one Redis.
        unique = f"{tmp_path.name}-{run_id}"[-64:]
        return BulkRun(
            run_id=unique, input=tmp_path / f"{run_id}.jsonl", output=tmp_path / f"{run_id}.out.jsonl", **fields
        )

    return make


def texts(run: BulkRun) -> dict[str, str]:
    rows = [json.loads(line) for line in run.output.read_text().splitlines()]
    found = {row["id"]: row["text"] for row in rows}
    assert len(found) == len(rows)
    return found


def expected(n_rows: int) -> dict[str, str]:
    return {f"r{n}": f"<p{n}>" for n in range(n_rows)}


@pytest.mark.usefixtures("worker")
def test_a_run_is_executed_by_an_rq_worker_that_unpickles_nothing(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("a", 5)
    assert runs.submit(run, on_success=note_success).state is RunState.QUEUED
    with pytest.raises(InvalidRequest, match="is already submitted, and is queued"):
        runs.submit(run)
    with pytest.raises(InvalidRequest, match=r"is queued, and has the same output: .*a\.out\.jsonl"):
        runs.submit(run.model_copy(update={"run_id": "another"}))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(DefaultSerializer, "loads", refuse)
    work(rq_queue)
    status = runs.wait(run.run_id, timeout=30)
    assert status.state is RunState.COMPLETED
    assert status.progress is not None
    assert (status.progress.rows_done, status.progress.rows_total, status.error) == (5, 5, None)
    assert status.ended is not None
    assert status.output == run.output
    assert texts(run) == expected(5)
    Queue(rq_queue.name, connection=rq_queue.connection).enqueue(note_success)  # pickled, by another application
    assert [found.run_id for found in runs.runs()] == [run.run_id]
    assert successes == [run.run_id]


successes: list[str] = []


def note_success(job: Job, connection: Redis, result: Any) -> None:
    successes.append(result["run_id"])


failures: list[str] = []


def note_failure(job: Job, connection: Redis, kind: type[Exception], *_: object) -> None:
    failures.append(f"{job.id}: {kind.__name__}")


def fail_after_success(*_: object) -> None:
    raise KeyError("no such report")


@pytest.mark.parametrize("option", ["on_success", "on_failure"])
@pytest.mark.parametrize(
    "name", ["nomodule.f", f"{__name__}.nothing", f"{__name__}.failures", f"{__name__}.fail_one_row"]
)
def test_a_callback_that_cannot_be_called_refuses_the_run_at_once(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, option: str, name: str
) -> None:
    run = make_run("a")
    callback: dict[str, Any] = {option: name}
    runs.submit(run, **callback)
    work(rq_queue)
    status = runs.status(run.run_id)
    assert (status.state, status.retries_left) == (RunState.FAILED, 0)
    assert status.error is not None
    assert status.error.startswith(f"BulkRunRefused: {option}: ")
    assert name in status.error
    assert not run.output.exists()


@pytest.mark.usefixtures("worker")
def test_an_error_of_the_success_callback_does_not_repeat_the_run(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun
) -> None:
    run = make_run("a")
    runs.submit(run, on_success=fail_after_success)
    work(rq_queue)
    status = runs.status(run.run_id)
    assert (status.state, status.retries_left) == (RunState.FAILED, 0)
    assert "the on_success function has failed: KeyError: 'no such report'" in str(status.error)
    assert texts(run) == expected(3)
    runs.submit(run, on_success=note_success)
    work(rq_queue)
    assert runs.status(run.run_id).state is RunState.COMPLETED
    assert successes[-1] == run.run_id


@pytest.mark.usefixtures("worker")
def test_a_run_waits_for_the_runs_before_it_and_for_its_time(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun
) -> None:
    first, second, third = make_run("a"), make_run("b"), make_run("c")
    runs.submit(first)
    assert runs.submit(second, after=[first.run_id]).state is RunState.DEFERRED
    assert runs.submit(third, at=datetime.now(UTC) + timedelta(hours=1)).state is RunState.SCHEDULED
    with pytest.raises(InvalidRequest, match="cannot have a time too"):
        runs.submit(make_run("d"), after=[first.run_id], at=datetime.now(UTC))
    with pytest.raises(InvalidRequest, match="there is no run nothing"):
        runs.submit(make_run("d"), after=["nothing"])
    work(rq_queue)
    assert texts(first) == texts(second) == expected(3)
    assert runs.cancel(third.run_id).state is RunState.CANCELLED
    with pytest.raises(InvalidRequest, match="is cancelled, so no run can wait for it"):
        runs.submit(make_run("d"), after=[third.run_id])
    with pytest.raises(InvalidRequest, match="there is no run nothing"):
        runs.submit(first, after=["nothing"])
    assert runs.status(first.run_id).state is RunState.COMPLETED, "the refused submit has deleted nothing"
    runs.submit(third)
    work(rq_queue)
    assert texts(third) == expected(3)


def test_a_run_that_cannot_begin_fails_at_once_and_is_not_tried_again(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, redis_url: str, queue: str
) -> None:
    run = make_run("a")
    run.input.unlink()
    runs.submit(run, on_failure=note_failure)
    after = make_run("b")
    runs.submit(after, after=[run.run_id])
    work(rq_queue)
    assert failures == [f"{run.run_id}: BulkRunRefused"]
    assert runs.status(after.run_id).state is RunState.DEFERRED
    status = runs.status(run.run_id)
    assert status.state is RunState.FAILED
    assert "there is no such file" in str(status.error)
    make_run("a")
    runs.submit(run)
    with serving(redis_url, queue, echo):
        work(rq_queue)
    assert runs.status(run.run_id).state is runs.status(after.run_id).state is RunState.COMPLETED


async def fail_one_row(worker: FakeWorker, answer: Callable[[JobRequest], list[str]]) -> None:
    """Serve the queue, and fail the job of row 2 at its first submit."""
    await worker.announce()
    has_failed = False
    while True:
        attempt = await worker.start_next()
        if attempt.request.prompt == "p2" and not has_failed:
            has_failed = True
            await attempt.fail()
        else:
            await attempt.answer(answer(attempt.request))


def test_failed_rows_are_computed_again_and_join_the_output(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "serve", fail_one_row)
    run = make_run("a", 4)
    with run.input.open("a") as file:
        file.write(json.dumps({"id": "r4", "prompt": "p4", "temperature": "hot"}) + "\n")
    runs.submit(run, on_success=note_success)
    with pytest.raises(InvalidRequest, match="has not ended"):
        runs.retry_errors(run.run_id)
    with serving(redis_url, queue, echo):
        work(rq_queue)
        assert texts(run).keys() == {"r0", "r1", "r3"}
        assert len(run.error_file.read_text().splitlines()) == 2
        runs.retry_errors(run.run_id)
        work(rq_queue)
    status = runs.status(run.run_id)
    assert status.state is RunState.COMPLETED
    assert status.progress is not None
    assert (status.progress.rows_before, status.progress.rows_done, status.progress.rows_failed) == (3, 5, 1)
    assert texts(run) == expected(4)
    assert [json.loads(line)["id"] for line in run.error_file.read_text().splitlines()] == ["r4"]
    assert successes[-2:] == [run.run_id] * 2
    assert [found.run_id for found in runs.runs()] == [run.run_id]


def test_a_worker_with_the_default_serializer_fails_with_the_way_out(
    runs: BulkQueue, rq_redis: Redis, rq_queue: Queue, make_run: MakeRun, redis_url: str, queue: str
) -> None:
    run = make_run("a")
    runs.submit(run)
    pickling = Queue(rq_queue.name, connection=rq_redis)
    InProcessWorker([pickling], connection=rq_redis).work(burst=True, logging_level="CRITICAL")
    status = runs.status(run.run_id)
    assert status.state is RunState.FAILED
    assert "an RQ worker with another serializer took the run: start workers with `llamaq bulk worker`" in str(
        status.error
    )
    runs.submit(run)
    with serving(redis_url, queue, echo):
        work(rq_queue)
    assert texts(run) == expected(3)


def test_a_cancelled_run_leaves_no_row_in_the_queue(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("a", 30)
    runs.submit(run)
    job = Job.fetch(run.run_id, connection=rq_queue.connection, serializer=JSONSerializer)
    job.meta["progress"] = {"run_id": run.run_id, "rows_total": 30}  # a SIGKILL left it, and 20 rows in the queue
    job.save_meta()
    with Client(redis_url, queue) as client:
        client.submit_many([{"prompt": "x", "idempotency_key": f"{run.run_id}:{row}"} for row in range(11, 31)])
        for key in ("11", "11:1", "12"):  # earlier calls of the run have cancelled these jobs
            client.submit("x", idempotency_key=f"{run.run_id}:{key}").cancel()
        client.submit_many([{"prompt": "x", "idempotency_key": f"{run.run_id}:{key}"} for key in ("11:2", "12:1")])
        other = client.submit("x", idempotency_key="other:11")
        monkeypatch.setenv(
            "LLAMAQ_REDIS_URL", "redis://127.0.0.1:1"
        )  # `llamaq bulk cancel --redis-url` ignored its URL
        with BulkQueue(rq_queue=rq_queue.name, redis_url=redis_url) as named:
            assert named.cancel(run.run_id).state is RunState.CANCELLED
        assert [left.job_id for left in client.jobs()] == [other.id]


def test_a_cancelled_run_leaves_no_row_behind_a_thousand_blank_lines(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, redis_url: str, queue: str
) -> None:
    """The search ended at the first thousand numbers without a job after the number of rows."""
    run = make_run("a", 3)
    runs.submit(run)
    job = Job.fetch(run.run_id, connection=rq_queue.connection, serializer=JSONSerializer)
    bulk_jobs._save_progress(job, BulkProgress(run_id=run.run_id, rows_total=3, last_row=3501))
    bulk_jobs._save_progress(job, BulkProgress(run_id=run.run_id, rows_total=3, last_row=1))  # of the next process
    with Client(redis_url, queue) as client:
        client.submit("x", idempotency_key=f"{run.run_id}:3501")
        runs.cancel(run.run_id)
        assert not client.jobs()


@pytest.mark.usefixtures("worker")
def test_a_run_continues_in_the_minute_after_the_heartbeat_of_its_dead_rq_worker_has_expired(
    runs: BulkQueue, rq_queue: Queue, rq_redis: Redis, make_run: MakeRun
) -> None:
    """RQ raised `ValueError: Execution … not found in Redis`."""
    run = make_run("a")
    for call in (runs.cancel, lambda _: None):
        runs.submit(run)
        job = Job.fetch(run.run_id, connection=rq_redis, serializer=JSONSerializer)
        execution = BulkWorker(rq_queue.name, rq_redis).prepare_execution(job)
        rq_queue.remove(job)
        job.set_status(JobStatus.STARTED if call == runs.cancel else JobStatus.FAILED)
        rq_redis.delete(execution.key)
        call(run.run_id)
        assert runs.submit(run).state is RunState.QUEUED
        assert not rq_queue.started_job_registry.get_job_ids()
        work(rq_queue)
        assert texts(run) == expected(3)


def test_a_search_for_abandoned_runs_that_redis_has_interrupted_does_not_delay_the_next_one(
    rq_queue: Queue, rq_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ locked the search for 15 minutes, and the interrupted RQ worker did not release the lock."""

    def lose_connection(*_: object) -> NoReturn:
        raise RedisConnectionError

    worker = BulkWorker(rq_queue.name, rq_redis)
    with monkeypatch.context() as patch:
        patch.setattr(FinishedJobRegistry, "cleanup", lose_connection)
        with pytest.raises(RedisConnectionError):
            worker.run_maintenance_tasks()
    assert 0 < rq_redis.ttl(rq_queue.registry_cleaning_key) <= 60


def test_a_retry_of_a_run_is_written_at_once(
    runs: BulkQueue, rq_queue: Queue, rq_redis: Redis, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Redis died in the middle, the run was scheduled, but at no time: it was never tried again."""
    run = make_run("a")
    runs.submit(run)
    worker = BulkWorker(rq_queue.name, rq_redis)
    job = worker.job_class.fetch(run.run_id, connection=rq_redis, serializer=JSONSerializer)
    execution = worker.prepare_execution(job)
    rq_queue.remove(job)
    job.set_status(JobStatus.STARTED)
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "execute", lambda *_, **__: None)  # Redis has died
        worker.handle_job_failure(job, rq_queue)
    assert runs.status(run.run_id).state is RunState.RUNNING
    rq_redis.zadd(rq_queue.started_job_registry.key, {execution.composite_key: 1})  # the heartbeat has expired
    runs.runs()  # as each RQ worker, it finds runs that were abandoned
    assert runs.status(run.run_id).state is RunState.SCHEDULED


def test_an_rq_worker_ignores_the_late_stop_of_a_run_that_was_submitted_again(
    runs: BulkQueue, rq_queue: Queue, rq_redis: Redis, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = BulkWorker(rq_queue.name, rq_redis)
    monkeypatch.setattr(Worker, "execute_job", lambda *_: None)
    monkeypatch.setattr(worker, "get_current_job_id", lambda: make_run("a").run_id)
    killed: list[str] = []
    monkeypatch.setattr(worker, "kill_horse", lambda *_: killed.append("horse"))
    run = make_run("a")
    stops = []
    for _ in range(2):
        runs.submit(run)
        job = Job.fetch(run.run_id, connection=rq_redis, serializer=JSONSerializer)
        stop = {"command": "stop-job", "job_id": job.id, "submitted": submit_time(job)}
        stops.append({"data": json.dumps(stop).encode()})
        runs.cancel(run.run_id)
    worker.execute_job(job, rq_queue)
    worker.handle_payload(stops[0])
    assert not killed
    worker.handle_payload(stops[1])
    assert killed == ["horse"]


@pytest.mark.starts_processes
def test_only_the_work_horse_is_killed(rq_queue: Queue, rq_redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """RQ killed its own process group: that of the shell script that had started the RQ worker."""
    worker = BulkWorker(rq_queue.name, rq_redis)
    groups: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: groups.append(group))
    worker.kill_horse()
    with subprocess.Popen(["sleep", "60"]) as just_forked:
        worker._horse_pid = just_forked.pid
        worker.kill_horse()
        assert just_forked.wait(60) == -signal.SIGKILL
    worker.kill_horse()
    assert not groups
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as horse:
        worker._horse_pid = horse.pid
        worker.kill_horse()
        assert groups == [horse.pid]
        horse.kill()


def test_rq_needs_a_single_server(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", "redis+cluster://localhost")
    with pytest.raises(InvalidSettings, match=r"--rq-url .LLAMAQ_RQ_URL.: RQ needs a single Redis server"):
        BulkQueue()
    monkeypatch.setenv("LLAMAQ_RQ_URL", redis_url)
    with BulkQueue() as runs:
        assert runs.settings.rq_url == redis_url


def test_an_idle_worker_enqueues_runs_that_are_due(
    runs: BulkQueue, rq_queue: Queue, rq_redis: Redis, make_run: MakeRun
) -> None:
    run = make_run("a")
    runs.submit(run, at=datetime.now(UTC) - timedelta(seconds=1))
    assert runs.status(run.run_id).state is RunState.SCHEDULED
    BulkWorker(rq_queue.name, rq_redis).run_maintenance_tasks()
    assert runs.status(run.run_id).state is RunState.QUEUED


def test_without_rq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rq", None)
    with pytest.raises(MissingExtra, match=r"pip install 'llamaq\[rq\]'"):
        importlib.reload(library)


def test_a_stop_begins_with_the_newest_rows_and_has_time_for_all(
    runs: BulkQueue, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ's default are 60 seconds, in which about a million rows are looked up."""
    looked_up: list[tuple[Any, ...]] = []

    async def note(_: object, *rows: Any) -> int:
        looked_up.append(rows)
        return 0

    monkeypatch.setattr(bulk_jobs, "cancel_rows_in_flight", note)
    run = make_run("a")
    runs.submit(run)
    job = Job.fetch(run.run_id, connection=runs.redis, serializer=JSONSerializer)
    assert job.stopped_callback_timeout == 3600
    for progress in ({"rows_total": 9000, "last_row": 20}, {"rows_total": 9000}, {}):
        job.meta[bulk_jobs.PROGRESS_KEY] = progress
        job.save_meta()
        bulk_jobs.cancel_rows(job, runs.redis)
    assert looked_up == [(run.run_id, 20, 9000), (run.run_id, 9000, 9000), (run.run_id, 0, 0)]


def test_a_run_that_a_newer_client_has_submitted_breaks_no_command(
    runs: BulkQueue, rq_queue: Queue, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    newer, run = make_run("newer"), make_run("a")
    fields = {**newer.model_dump(mode="json"), "from_the_future": 1}
    rq_queue.enqueue(bulk_jobs.run_bulk, fields, job_id=newer.run_id)
    assert runs.submit(run).run_id == run.run_id
    assert [found.run_id for found in runs.runs()] == [run.run_id]
    assert f"run {newer.run_id} cannot be read" in caplog.text
    for call in (runs.status, runs.cancel, runs.retry_errors, lambda _: runs.submit(newer)):
        with pytest.raises(InvalidRequest, match="cannot be read: perhaps a newer llamaq submitted it"):
            call(newer.run_id)
    assert Job.exists(newer.run_id, connection=runs.redis)


def test_rq_drops_a_cancelled_run_after_30_days(runs: BulkQueue, make_run: MakeRun) -> None:
    run = make_run("a")
    runs.submit(run)
    runs.cancel(run.run_id)
    days = runs.redis.ttl(Job.key_for(run.run_id)) / 86400
    assert 29 < days <= 30
    runs.submit(run)
    assert runs.redis.ttl(Job.key_for(run.run_id)) == -1
