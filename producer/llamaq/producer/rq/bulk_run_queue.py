"""Submits bulk runs to RQ workers, and follows them: for backends, and for commands such as `llamaq bulk submit`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Self

from redis import Redis

from llamaq.common.errors import InvalidRequest
from llamaq.common.settings import client_settings
from llamaq.producer.bulk import BulkRun, BulkState
from llamaq.producer.rq import bulk_jobs
from llamaq.producer.rq.library import (
    PUBSUB_CHANNEL_TEMPLATE,
    AtomicRetryJob,
    Callback,
    DeserializationError,
    InvalidJobOperation,
    Job,
    JobStatus,
    JSONSerializer,
    NoSuchJobError,
    Queue,
    Retry,
    Worker,
    send_command,
)
from llamaq.producer.rq.run_status import ENDED, RunState, RunStatus, read_status
from llamaq.producer.rq.settings import connect_rq, rq_settings
from llamaq.producer.rq.withdrawn_run import SUBMITTED_KEY, forget_executions, submit_time

RETRIES = 20
"""How often RQ tries a run again after an error."""
FIRST_RETRY_S, MAX_RETRY_S = 1, 300
"""Seconds until the first retry, and upper bound on the seconds until a later retry. The delay doubles with each
retry."""
KEEP_S = 30 * 24 * 3600
"""How long RQ stores a run after its end."""
CANCEL_S = 3600
"""Longest time to cancel the rows of a stopped run."""
POLL_S = 0.5
STOP_S = 15.0
"""Longest wait for the RQ worker of a cancelled run."""
WORK_HORSE_S = 3.0
"""Longest wait for a new progress of the process of a cancelled run. It reports twice a second, and looks every second
whether its run was cancelled."""
MAX_CANCELS = 3
"""A cancelled run is cancelled again at most this often, because RQ has started or enqueued it at the same moment."""

Called = Callable[..., Any] | str
"""A function that an RQ worker can import, or its path `module.function`."""


class BulkQueue:
    """The bulk runs in an RQ queue.

        with BulkQueue() as runs:
            runs.submit(BulkRun(run_id="reviews", input="in.jsonl", output="out.jsonl"))
            print(runs.status("reviews").progress)
            runs.wait("reviews")

    Args:
        rq_url: URL of RQ's Redis. None: the setting `rq_url`, or else the Redis of llamaq.
        rq_queue: Name of the RQ queue. None: the setting `rq_queue`.
        redis_url: URL of llamaq's Redis. `cancel` finds the rows of a run there. None: the setting. If `rq_url` is not
            set, RQ uses it too.

    Raises:
        InvalidSettings: RQ cannot use the server, because the URL names a cluster or Sentinels, or is not valid.
    """

    def __init__(self, rq_url: str | None = None, rq_queue: str | None = None, *, redis_url: str | None = None) -> None:
        self.settings = rq_settings(rq_url=rq_url, rq_queue=rq_queue)
        self.redis: Redis = connect_rq(self.settings, redis_url)
        self._redis_url = redis_url
        self._rq = Queue(
            self.settings.rq_queue, connection=self.redis, serializer=JSONSerializer, job_class=AtomicRetryJob
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.redis.close()

    def submit(
        self,
        run: BulkRun,
        *,
        queue: str | None = None,
        after: Sequence[str] = (),
        at: datetime | None = None,
        retries: int = RETRIES,
        on_success: Called | None = None,
        on_failure: Called | None = None,
    ) -> RunStatus:
        """Pass a run to the RQ workers. A run that was cancelled or has failed continues where it stopped.

        Args:
            run: The run. Its files are opened by the RQ worker: relative paths begin at the folder of this process.
            queue: The llamaq queue. None: the setting of this process if it has one, or else that of the RQ worker.
            after: Ids of runs that must be complete before this one begins.
            at: Time at which the run is due. None: at once.
            retries: How often RQ tries again after an error. A stop of the RQ worker does not count as an error. Its
                death during this run counts as an error.
            on_success: Called by the RQ worker after the run, as RQ documents: `(job, connection, result)`. If it
                raises, the run has failed, but is not tried again: its rows are computed.
            on_failure: Called by the RQ worker after each error: `(job, connection, type, value, traceback)`. A run
                with a function that the RQ worker cannot import is refused before its first row.

        Returns:
            The status of the run.

        Raises:
            InvalidRequest: The run is already submitted, or a run of `after` does not exist or will not complete.
        """
        if at is not None and after:
            raise InvalidRequest("at: a run that waits for other runs (after) cannot have a time too")
        self._check_can_submit(run)
        self._check_dependencies(after)
        if Job.exists(run.run_id, connection=self.redis):  # an earlier run with this id, which has ended
            self.status(run.run_id)  # one that cannot be read may not have ended
            _delete(self._job(run.run_id))
        options = _options(run, retries=retries, after=after, on_success=on_success, on_failure=on_failure)
        call = {"args": [_as_json(run)], "kwargs": {"queue": _named_queue(queue)}, **options}
        if at is None:
            job = self._rq.enqueue(bulk_jobs.run_bulk, **call)
        else:
            job = self._rq.enqueue_at(at, bulk_jobs.run_bulk, **call)
        return read_status(job)

    def runs(self) -> list[RunStatus]:
        """Return all runs that RQ stores and that can be read, newest first."""
        found = []
        for job in filter(_executes_run, self._jobs()):
            try:
                found.append(read_status(job))
            except InvalidRequest as exc:
                bulk_jobs.log.warning("bulk.run_skipped: %s", exc)
        return sorted(found, key=lambda run: run.submitted or datetime.min.replace(tzinfo=UTC), reverse=True)

    def n_workers(self) -> int:
        """Return the number of RQ workers that serve the RQ queue."""
        return Worker.count(queue=self._rq)

    def status(self, run_id: str) -> RunStatus:
        """Return the status of a run.

        Args:
            run_id: The name of the run.

        Raises:
            InvalidRequest: There is no such run, or RQ has dropped it 30 days after its end.
        """
        return read_status(self._job(run_id))

    def watch(self, run_id: str, *, timeout: float | None = None) -> Iterator[RunStatus]:
        """Yield the status of a run twice a second, until the run has ended.

        Args:
            run_id: The name of the run.
            timeout: Longest time in seconds. None: no limit.

        Raises:
            InvalidRequest: There is no such run.
            TimeoutError: The run has not ended in time.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self.status(run_id)
            yield status
            if status.state in ENDED:
                return
            if end_s is not None and time.monotonic() >= end_s:
                raise TimeoutError(f"run {run_id} is {status.state.value} after {timeout:g} s")
            time.sleep(POLL_S)

    def wait(self, run_id: str, *, timeout: float | None = None) -> RunStatus:
        """Wait until a run has ended, and return its last status.

        Args:
            run_id: The name of the run.
            timeout: Longest wait in seconds. None: no limit.

        Raises:
            InvalidRequest: There is no such run.
            TimeoutError: The run has not ended in time.
        """
        return deque(self.watch(run_id, timeout=timeout), maxlen=1).pop()

    def cancel(self, run_id: str) -> RunStatus:
        """Stop a run. The rows that are done stay in the output. A later `submit` of the same run continues it.

        Args:
            run_id: The name of the run.

        Raises:
            InvalidRequest: There is no such run.
        """
        job = self._job(run_id)
        for _ in range(MAX_CANCELS):
            was_running = self.status(run_id).state is RunState.RUNNING
            if was_running:
                self._stop(job)
            status = self.status(run_id)
            if status.state in ENDED:
                break
            with suppress(InvalidJobOperation):  # another process has cancelled it just now
                forget_executions(job)
                job.cancel()
                self.redis.expire(job.key, KEEP_S)
            if was_running:
                self._await_work_horse(run_id)
            if was_running or status.progress is not None:  # its process was killed, so its rows may still run
                bulk_jobs.cancel_rows_of(job, self._redis_url)
        return self.status(run_id)

    def retry_errors(self, run_id: str) -> RunStatus:
        """Compute again the failed rows of an ended run. Their answers are added to the output.

        Args:
            run_id: The name of the run.

        Raises:
            InvalidRequest: There is no such run, or it has not ended.
        """
        old = self._job(run_id)
        if read_status(old).state not in ENDED:
            raise InvalidRequest(f"run {run_id} has not ended: wait for it, or cancel it")
        run = BulkRun.model_validate(old.args[0]).model_copy(update={"deadline": None})
        options = _options(run, **old.meta.get(bulk_jobs.SUBMIT_KEY, {}))
        _delete(old)
        call = {"args": [_as_json(run)], "kwargs": {**old.kwargs, "retry_errors": True}, **options}
        return read_status(self._rq.enqueue(bulk_jobs.run_bulk, **call))

    # ---- jobs of RQ

    def _job(self, run_id: str) -> Job:
        try:
            job = Job.fetch(run_id, connection=self.redis, serializer=JSONSerializer)
        except NoSuchJobError as exc:
            raise InvalidRequest(
                f"there is no run {run_id} in RQ queue {self._rq.name!r}; `llamaq bulk list` shows the runs"
            ) from exc
        if not _executes_run(job):
            raise InvalidRequest(f"RQ job {run_id} is not a bulk run")
        return job

    def _jobs(self) -> list[Job]:
        rq = self._rq
        lists = (
            rq,
            rq.started_job_registry,
            rq.scheduled_job_registry,
            rq.deferred_job_registry,
            rq.finished_job_registry,
            rq.failed_job_registry,
            rq.canceled_job_registry,
        )
        ids = dict.fromkeys(job_id for each in lists for job_id in each.get_job_ids())
        fetched = Job.fetch_many(list(ids), connection=self.redis, serializer=JSONSerializer)
        return [job for job in fetched if job is not None]

    def _check_can_submit(self, run: BulkRun) -> None:
        """Check that no run with this id or this output waits or runs."""
        output = run.output.absolute()
        for other in self.runs():
            if other.state in ENDED:
                continue
            if other.run_id == run.run_id:
                raise InvalidRequest(f"run {run.run_id} is already submitted, and is {other.state.value}")
            if other.output == output:
                raise InvalidRequest(f"run {other.run_id} is {other.state.value}, and has the same output: {output}")

    def _check_dependencies(self, after: Iterable[str]) -> None:
        for run_id in after:
            state = self.status(run_id).state
            if state in (RunState.FAILED, RunState.CANCELLED):
                raise InvalidRequest(f"after: run {run_id} is {state.value}, so no run can wait for it to complete")

    def _stop(self, job: Job) -> None:
        """Tell the RQ worker of a run to stop the run, and wait until it has stopped. If the RQ worker is dead, or has
        no connection, the wait ends at once.
        """
        worker = self.status(job.id).worker
        if worker:  # otherwise it has ended just now
            send_command(self.redis, worker, "stop-job", job_id=job.id, **{SUBMITTED_KEY: submit_time(job)})
        end_s = time.monotonic() + STOP_S
        while (status := self.status(job.id)).state is RunState.RUNNING and time.monotonic() < end_s:
            if not status.worker or not self._is_connected(status.worker):
                return
            time.sleep(POLL_S / 5)

    def _is_connected(self, worker_name: str) -> bool:
        """Return whether an RQ worker receives commands."""
        ((_, n_subscribers),) = self.redis.pubsub_numsub(PUBSUB_CHANNEL_TEMPLATE % worker_name)
        return bool(n_subscribers)

    def _await_work_horse(self, run_id: str) -> None:
        """Wait until the process of a run, if there is one, has noticed that the run was cancelled, and has ended."""
        last, end_s = self.status(run_id).progress, time.monotonic() + WORK_HORSE_S
        while time.monotonic() < end_s:
            time.sleep(POLL_S / 5)
            progress = self.status(run_id).progress
            if progress != last:
                if progress is not None and progress.state is BulkState.STOPPED:
                    return
                last, end_s = progress, time.monotonic() + WORK_HORSE_S


def _options(
    run: BulkRun,
    *,
    retries: int = RETRIES,
    after: Sequence[str] = (),
    on_success: Called | None = None,
    on_failure: Called | None = None,
) -> dict[str, Any]:
    """Return the options of RQ for the job of a run."""
    given = {"on_success": on_success, "on_failure": on_failure}
    names = {option: Callback(called).name if called else None for option, called in given.items()}
    return {
        "job_id": run.run_id,
        "description": f"llamaq bulk run {run.run_id}: {run.input.name} -> {run.output.name}",
        "job_timeout": -1,
        "result_ttl": KEEP_S,
        "failure_ttl": KEEP_S,
        "depends_on": list(after) or None,
        "retry": _retry(retries),
        "meta": {bulk_jobs.SUBMIT_KEY: {"retries": retries, **names}},
        "on_success": Callback(bulk_jobs.report_success),
        "on_failure": Callback(bulk_jobs.explain_failure),
        "on_stopped": Callback(bulk_jobs.cancel_rows, CANCEL_S),
    }


def _as_json(run: BulkRun) -> dict[str, Any]:
    """Return the fields of a run as JSON values, with absolute paths."""
    fields: dict[str, Any] = run.model_dump(mode="json")
    for name in ("input", "output", "errors"):
        path = getattr(run, name)
        fields[name] = None if path is None else str(path.absolute())
    return fields


def _named_queue(queue: str | None) -> str | None:
    """Return the llamaq queue that an argument or a setting of this process names. None: neither does."""
    settings = client_settings(queue=queue)
    return settings.queue if "queue" in settings.model_fields_set else None


def _delete(job: Job) -> None:
    """Delete the RQ job of a run that has ended. Runs that wait for it then wait for the next RQ job with the same
    id.
    """
    dependents = Job.fetch_many(job.dependent_ids, connection=job.connection, serializer=job.serializer)
    forget_executions(job)
    job.delete()
    for dependent in dependents:
        if dependent is not None and dependent.get_status(refresh=False) is JobStatus.DEFERRED:
            dependent.register_dependency()


def _executes_run(job: Job) -> bool:
    try:
        name: str = job.func_name
    except DeserializationError:  # another application uses the same RQ queue, with another serializer
        return False
    return name == f"{bulk_jobs.__name__}.{bulk_jobs.run_bulk.__name__}"


def _retry(retries: int) -> Retry | None:
    """Return the retries of a job, with delays that double."""
    if not retries:
        return None
    return Retry(max=retries, interval=[min(FIRST_RETRY_S * 2**number, MAX_RETRY_S) for number in range(retries)])
