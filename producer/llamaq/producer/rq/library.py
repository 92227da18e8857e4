"""Imports the RQ library, and mends how it retries a job. The other modules of this package import it from here.

The package works with RQ 2.12 and 3.x.
"""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline

from llamaq.common.errors import MissingExtra

try:
    from rq import Callback, Queue, Retry, Worker, get_current_job
    from rq.command import PUBSUB_CHANNEL_TEMPLATE, parse_payload, send_command
    from rq.exceptions import DeserializationError, InvalidJobOperation, NoSuchJobError, StopRequested
    from rq.executions import Execution
    from rq.job import Job, JobStatus
    from rq.scheduler import RQScheduler
    from rq.serializers import JSONSerializer
    from rq.utils import import_attribute
except ModuleNotFoundError as exc:
    if exc.name is None or exc.name.partition(".")[0] != "rq":
        raise
    raise MissingExtra("llamaq.producer.rq", "rq") from exc

__all__ = [
    "PUBSUB_CHANNEL_TEMPLATE",
    "AtomicRetryJob",
    "Callback",
    "DeserializationError",
    "Execution",
    "InvalidJobOperation",
    "JSONSerializer",
    "Job",
    "JobStatus",
    "NoSuchJobError",
    "Queue",
    "RQScheduler",
    "Retry",
    "StopRequested",
    "Worker",
    "get_current_job",
    "import_attribute",
    "parse_payload",
    "send_command",
]


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
