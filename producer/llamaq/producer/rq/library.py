"""Imports the RQ library. The other modules of this package import it from here.

The package works with RQ 2.12 and 3.x.
"""

from __future__ import annotations

from llamaq.common.errors import MissingExtra

try:
    from rq import Callback, Queue, Retry, SimpleWorker, Worker, get_current_job
    from rq.command import send_stop_job_command
    from rq.exceptions import InvalidJobOperation, NoSuchJobError
    from rq.job import Dependency, Job, JobStatus
    from rq.scheduler import RQScheduler
    from rq.serializers import JSONSerializer
except ModuleNotFoundError as exc:
    if exc.name is None or exc.name.partition(".")[0] != "rq":
        raise
    raise MissingExtra("llamaq.producer.rq", "rq") from exc

__all__ = [
    "Callback",
    "Dependency",
    "InvalidJobOperation",
    "JSONSerializer",
    "Job",
    "JobStatus",
    "NoSuchJobError",
    "Queue",
    "RQScheduler",
    "Retry",
    "SimpleWorker",
    "Worker",
    "get_current_job",
    "send_stop_job_command",
]
