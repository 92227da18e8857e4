"""The functions of RQ jobs that execute bulk runs. Their arguments and results are JSON objects."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.errors import BulkRunBusy, BulkRunIncomplete, BulkRunRefused, LlamaqError
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkProgress, BulkRun, BulkState, drop_errors, execute
from llamaq.producer.bulk.orphaned_job_cancellation import cancel_rows_in_flight
from llamaq.producer.rq.library import DeserializationError, Job, Retry, get_current_job, import_attribute
from llamaq.producer.rq.withdrawn_run import is_replaced, is_withdrawn
from llamaq.producer.rq.work_horse_stop import end_work_horse, interruption

log = logging.getLogger(__name__)

PROGRESS_KEY = "progress"
"""The key of the progress in the `meta` of an RQ job."""
ERROR_KEY = "error"
"""The key of the error of the last try in the `meta` of an RQ job. RQ stores only errors without a retry."""
DROPPED_KEY = "errors_dropped"
"""The key in the `meta` of an RQ job that says whether the rows that had failed before will be computed again."""
SUBMIT_KEY = "submit"
"""The key of the options of a submit in the `meta` of an RQ job."""
MAX_ERROR_CHARS = 500
UNLIMITED = 10**9
"""An interrupted run may be continued this often."""
OTHER_SERIALIZER = (
    "an RQ worker with another serializer took the run: start workers with `llamaq bulk worker`, or with "
    "`rq worker --serializer rq.serializers.JSONSerializer`"
)


def run_bulk(run: dict[str, Any], *, queue: str | None = None, retry_errors: bool = False) -> Any:
    """Execute or continue a bulk run. An RQ worker calls this function.

    A work-horse that receives SIGTERM or whose RQ worker has died stops the run, and RQ enqueues the job again. If the
    run was cancelled, the work-horse stops it and ends.

    Args:
        run: The fields of a `BulkRun`.
        queue: The llamaq queue. None: the setting of the RQ worker.
        retry_errors: Whether rows that failed in an earlier execution are computed again.

    Returns:
        The fields of the last `BulkProgress`.

    Raises:
        BulkRunRefused: The run cannot begin. RQ tries again only if another process executes the run.
        BulkRunIncomplete: The run has stopped before its end. RQ does not try again.
    """
    job = get_current_job()
    if job is None:
        raise RuntimeError("run_bulk runs in RQ jobs only: call llamaq.producer.bulk.execute instead")
    try:
        described = BulkRun.model_validate(run)
        for option in ("on_success", "on_failure"):
            _import_callback(job, option)  # raises before anything is computed
        log.info("bulk.run_started run=%s input=%s", described.run_id, described.input)
        if retry_errors and not job.meta.get(DROPPED_KEY):
            drop_errors(described)
            _save_meta(job, **{DROPPED_KEY: True})  # so that a retry keeps the errors of this execution
        progress = asyncio.run(_execute(described, queue, job))
        _save_progress(job, progress)
        log.info("bulk.run_ended run=%s state=%s rows=%d", described.run_id, progress.state, progress.rows_done)
        if progress.state is BulkState.STOPPED:
            if is_withdrawn(job):
                end_work_horse(job.id)  # otherwise RQ would put the cancelled run back into its queue
            return Retry(max=UNLIMITED)
        if progress.state is not BulkState.COMPLETED:
            raise _incomplete(progress)
    except Exception as exc:
        # RQ tries again if another process executes the run: it may be the work-horse of a killed RQ worker.
        if isinstance(exc, LlamaqError | ValueError) and not isinstance(exc, BulkRunBusy):
            job.retries_left = 0
        _save_error(job, exc)
        raise
    return progress.model_dump(mode="json")


def report_success(job: Job, connection: Redis, result: Any) -> None:
    """Call the `on_success` function of the submit. RQ calls this function after the run.

    Raises:
        Exception: The function has failed. RQ does not try the run again, because its rows are computed.
    """
    try:
        called = _import_callback(job, "on_success")
        if called is not None:
            called(job, connection, result)
    except Exception as exc:
        job.retries_left = 0
        _save_error(job, exc, "the rows are computed, but the on_success function has failed: ")
        raise


def explain_failure(
    job: Job, connection: Redis, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Call the `on_failure` function of the submit. An RQ worker with another serializer fails the run with a message.

    RQ calls this function after each error, before it decides whether to try the job again.
    """
    if issubclass(kind, DeserializationError):
        job.retries_left = 0
        log.error("bulk.cannot_read_run rq_job=%s: %s", job.id, OTHER_SERIALIZER)
        return
    try:
        called = _import_callback(job, "on_failure")
    except BulkRunRefused as exc:  # the error of the run says it too
        log.error("bulk.no_callback rq_job=%s: %s", job.id, exc)
        return
    if called is not None:
        called(job, connection, kind, error, traceback)


def _import_callback(job: Job, option: str) -> Callable[..., Any] | None:
    """Return a function that the submit named. None: it named none.

    Args:
        job: The RQ job of the run.
        option: `on_success` or `on_failure`.

    Raises:
        BulkRunRefused: The function cannot be imported here.
    """
    name = job.meta.get(SUBMIT_KEY, {}).get(option)
    if name is None:
        return None
    try:
        called = import_attribute(name)
    except Exception as exc:  # a module may raise anything
        raise BulkRunRefused(f"{option}: the RQ worker cannot import {name}: {exc}") from exc
    if not callable(called) or inspect.iscoroutinefunction(called):
        raise BulkRunRefused(f"{option}: {name} is not a function, or is an asynchronous one")
    return called


def cancel_rows(job: Job, connection: Redis) -> None:  # noqa: ARG001 - RQ calls it with both
    """Cancel the rows in flight of a run that was stopped. The run cannot do this: RQ stops a job by SIGKILL of its
    work-horse. The rows of a run that was submitted again since then are left alone.
    """
    if not is_replaced(job):
        cancel_rows_of(job)


def cancel_rows_of(job: Job, redis_url: str | None = None) -> None:
    """Cancel the rows in flight of the run of an RQ job, which no process executes now.

    Args:
        job: The RQ job.
        redis_url: URL of llamaq's Redis. None: the setting of this process.
    """
    progress = job.get_meta(refresh=True).get(PROGRESS_KEY) or {}
    n_rows = progress.get("rows_total") or 0
    last_row = progress.get("last_row", n_rows)  # an older version stored no last_row

    async def cancel() -> int:
        async with AsyncClient(redis_url, job.kwargs.get("queue")) as client:
            return await cancel_rows_in_flight(client, job.args[0]["run_id"], last_row, n_rows)

    log.info("bulk.run_stopped run=%s cancelled=%d", job.id, asyncio.run(cancel()))


async def _execute(run: BulkRun, queue: str | None, job: Job) -> BulkProgress:
    async with AsyncClient(queue=queue) as client, interruption(job) as interrupted:
        reporter = _ProgressReporter(partial(_save_progress, job))
        try:
            return await execute(
                run, client, on_progress=reporter.report, stop=interrupted.stop, check_stop=interrupted.check
            )
        finally:
            await reporter.close()


class _ProgressReporter:
    """Stores the newest progress in a thread. While a progress is being stored, only the newest later progress is
    kept.
    """

    def __init__(self, save: Callable[[BulkProgress], None]) -> None:
        self._save = save
        self._newest: BulkProgress | None = None
        self._tasks = BackgroundTasks()
        self._is_saving = False

    def report(self, progress: BulkProgress) -> None:
        self._newest = progress
        if not self._is_saving:
            self._is_saving = True
            self._tasks.start(self._save_newest())

    async def _save_newest(self) -> None:
        try:
            while self._newest is not None:
                progress, self._newest = self._newest, None
                await asyncio.to_thread(self._save, progress)
        finally:
            self._is_saving = False

    async def close(self) -> None:
        await self._tasks.wait()


def _incomplete(progress: BulkProgress) -> BulkRunIncomplete:
    """Return the error of a run that has stopped before its end."""
    too_many = f"{progress.failure}, more than its max_errors"
    reason = too_many if progress.state is BulkState.TOO_MANY_ERRORS else "it has reached its deadline"
    return BulkRunIncomplete(
        f"run {progress.run_id} stopped after {progress.rows_done} of {progress.rows_total} rows: {reason}. "
        "Submit it again to continue it"
    )


def _save_error(job: Job, exc: Exception, place: str = "") -> None:
    _save_meta(job, **{ERROR_KEY: f"{place}{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]})


def _save_progress(job: Job, progress: BulkProgress) -> None:
    stored = progress.model_dump(mode="json")
    stored["last_row"] = max(progress.last_row, (job.meta.get(PROGRESS_KEY) or {}).get("last_row", 0))
    _save_meta(job, **{PROGRESS_KEY: stored, ERROR_KEY: None})


def _save_meta(job: Job, **values: Any) -> None:
    """Store values in the `meta` of the RQ job, if the run was not submitted again meanwhile. If RQ's Redis does not
    answer, the next values are stored.
    """
    job.meta.pop("unserialized", None)  # an RQ worker with another serializer wrote what JSON cannot contain
    job.meta.update(values)
    try:
        if not is_replaced(job):
            job.save_meta()
    except (RedisError, OSError) as exc:
        log.warning("bulk.meta_not_stored rq_job=%s error=%s", job.id, exc)
