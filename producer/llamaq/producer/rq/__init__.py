"""Jobs of RQ: single generations as RQ jobs, and bulk runs that RQ workers execute."""

from __future__ import annotations

from llamaq.producer.rq.bulk_run_queue import BulkQueue
from llamaq.producer.rq.generation import cancel_job, chat, generate
from llamaq.producer.rq.run_status import RunState, RunStatus

__all__ = ["BulkQueue", "RunState", "RunStatus", "cancel_job", "chat", "generate"]
