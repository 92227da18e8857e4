"""Imports the RQ library. The other modules of this package import it from here.

The package works with RQ 2.12 and 3.x.
"""

from __future__ import annotations

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
