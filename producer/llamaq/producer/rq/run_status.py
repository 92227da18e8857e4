"""The state of a bulk run that was submitted to RQ."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import Field, ValidationError

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.wire_model import WireModel
from llamaq.producer.bulk import BulkProgress, BulkRun
from llamaq.producer.rq.bulk_jobs import ERROR_KEY, OTHER_SERIALIZER, PROGRESS_KEY
from llamaq.producer.rq.library import Job, JobStatus


class RunState(StrEnum):
    """The state of a submitted bulk run."""

    QUEUED = "queued"
    """The run waits for an RQ worker."""
    SCHEDULED = "scheduled"
    """The run waits for its time: that of `--at`, or that of its next try after an error."""
    DEFERRED = "deferred"
    """The run waits for the end of other runs (`--after`)."""
    RUNNING = "running"
    """An RQ worker executes the run."""
    COMPLETED = "completed"
    """All rows have an answer or an error."""
    FAILED = "failed"
    """The run has stopped before its end; `error` says why."""
    CANCELLED = "cancelled"
    """The run was cancelled. It continues if it is submitted again."""


ENDED = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})
"""States that a run leaves only if it is submitted again."""
_STATES = {
    JobStatus.SCHEDULED: RunState.SCHEDULED,
    JobStatus.DEFERRED: RunState.DEFERRED,
    JobStatus.STARTED: RunState.RUNNING,
    JobStatus.FINISHED: RunState.COMPLETED,
    JobStatus.FAILED: RunState.FAILED,
    JobStatus.STOPPED: RunState.CANCELLED,
    JobStatus.CANCELED: RunState.CANCELLED,
}


class RunStatus(WireModel):
    """A snapshot of a submitted bulk run."""

    run_id: str = Field(description="Name of the run.")
    state: RunState = Field(description="State of the run.")
    input: Path = Field(description="File with the requests.")
    output: Path = Field(description="File for the answers.")
    errors: Path = Field(description="File for the rows that failed.")
    submitted: datetime | None = Field(None, description="Time of the submit.")
    started: datetime | None = Field(None, description="Time when an RQ worker last started the run.")
    ended: datetime | None = Field(None, description="Time of the end.")
    progress: BulkProgress | None = Field(None, description="The last progress. None: no row was computed so far.")
    worker: str | None = Field(None, description="Name of the RQ worker that executes the run.")
    retries_left: int = Field(0, description="How often RQ tries again after an error.")
    error: str | None = Field(None, description="The error of the last try. None: there was none.")


def read_status(job: Job) -> RunStatus:
    """Return the status of the run that an RQ job executes. Raises `InvalidRequest` if it cannot be read."""
    try:
        run = BulkRun.model_validate(job.args[0])
    except ValidationError as exc:
        raise InvalidRequest(f"run {job.id} cannot be read: perhaps a newer llamaq submitted it") from exc
    state = _STATES.get(job.get_status(refresh=False), RunState.QUEUED)
    return RunStatus(
        run_id=run.run_id,
        state=state,
        input=run.input,
        output=run.output,
        errors=run.error_file,
        submitted=_in_utc(job.created_at),
        started=_in_utc(job.started_at),
        ended=_in_utc(job.ended_at) if state in ENDED else None,
        progress=_progress(job),
        worker=job.worker_name if state is RunState.RUNNING else None,
        retries_left=job.retries_left or 0,
        error=None if state is RunState.COMPLETED else _error(job),
    )


def _progress(job: Job) -> BulkProgress | None:
    try:
        return BulkProgress.model_validate(job.meta.get(PROGRESS_KEY))
    except ValidationError:
        return None


def _error(job: Job) -> str | None:
    """Return the error of the last try: that of the run, or the last line of an error that only RQ has stored."""
    result = job.latest_result()
    text = (result.exc_string if result is not None else None) or ""
    if "DeserializationError" in text:
        return OTHER_SERIALIZER
    if job.meta.get(ERROR_KEY):
        return str(job.meta[ERROR_KEY])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _in_utc(time: datetime | None) -> datetime | None:
    """Return the time with a time zone. RQ writes UTC, and some of its versions do not say so."""
    return time if time is None or time.tzinfo else time.replace(tzinfo=UTC)
