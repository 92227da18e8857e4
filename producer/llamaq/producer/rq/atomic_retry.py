"""An RQ job whose retry is written at once."""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline

from llamaq.producer.rq.library import Job, JobStatus, Queue


class AtomicRetryJob(Job):
    """An RQ job. Its retry is written in one transaction.

    RQ writes first that a job is scheduled, and then the time. If the RQ worker or Redis dies between the two, the job
    stays scheduled, and is never tried again. A cancel between the two is undone.
    """

    _pipeline: Pipeline | None = None
    """The transaction of the retry that is being written."""

    def retry(self, queue: Queue, pipeline: Pipeline) -> None:
        """Try the job again, at once or later. The caller executes the pipeline."""
        self._pipeline = pipeline
        try:
            super().retry(queue, pipeline)
        finally:
            self._pipeline = None

    def set_status(self, status: JobStatus, pipeline: Pipeline | None = None, **options: Any) -> None:
        """Write the status, in the pipeline if there is one."""
        super().set_status(status, pipeline=self._pipeline if pipeline is None else pipeline, **options)
