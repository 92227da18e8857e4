"""Notices that the RQ job of a run was cancelled, or replaced by a newer RQ job with the same id."""

from __future__ import annotations

from llamaq.producer.rq.library import Execution, Job, JobStatus, NoSuchJobError

SUBMITTED_KEY = "submitted"
"""The key of `submit_time` in the stop command of a run."""


def submit_time(job: Job) -> str:
    """Return the time of the submit of a run, which tells it from other RQ jobs with the same id."""
    return job.created_at.replace(tzinfo=None).isoformat()  # always UTC; not all versions of RQ say so


def is_replaced(job: Job) -> bool:
    """Return whether a job was deleted, perhaps because its run was submitted again. Its processes must write nothing
    then: the newer job has the same id, and therefore the same keys.

    Raises:
        RedisError: RQ's Redis does not answer.
    """
    return _stored(job) is None


def is_withdrawn(job: Job) -> bool:
    """Return whether a job was cancelled or replaced, so that its process must end and must not be tried again.

    Raises:
        RedisError: RQ's Redis does not answer.
    """
    stored = _stored(job)
    return stored is None or stored.get_status(refresh=False) is JobStatus.CANCELED


def forget_executions(job: Job) -> None:
    """Delete what RQ stores about the executions of a job.

    RQ deletes it too when it cancels or deletes a job. But it raises `ValueError` for a minute after the heartbeat of
    a dead RQ worker has expired: the execution has expired then, and the registry still names it.

    Raises:
        RedisError: RQ's Redis does not answer.
    """
    ids = job.execution_registry.get_execution_ids()
    with job.connection.pipeline() as pipeline:
        for execution_id in ids:
            Execution(execution_id, job.id, job.connection).delete(job, pipeline)
        pipeline.execute()


def _stored(job: Job) -> Job | None:
    """Return the job as RQ stores it now. None: it was deleted. A newer job may have its id."""
    try:
        stored = Job.fetch(job.id, connection=job.connection, serializer=job.serializer)
    except NoSuchJobError:
        return None
    return stored if submit_time(stored) == submit_time(job) else None
