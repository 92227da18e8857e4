"""Notices that the process of an RQ job, the work-horse, must end or has lost its RQ worker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llamaq.common.background_tasks import cancel_tasks

log = logging.getLogger(__name__)

PARENT_CHECK_S = 1.0


def is_work_horse(job_id: str) -> bool:
    """Return whether this process was forked to execute this one RQ job. RQ sets the variable only there."""
    return os.environ.get("RQ_JOB_ID") == job_id


@asynccontextmanager
async def interruption(job_id: str) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set when the work-horse receives SIGTERM, or when its RQ worker has died.

    Without its RQ worker, a work-horse sends no heartbeat and receives no stop command, and RQ would soon let another
    worker start the same job. In a process that is not a work-horse, the event is never set.

    Args:
        job_id: The id of the RQ job.
    """
    stop = asyncio.Event()
    if not is_work_horse(job_id):
        yield stop
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    watching = asyncio.create_task(_watch_parent(os.getppid(), stop))
    try:
        yield stop
    finally:
        await cancel_tasks(watching)
        loop.remove_signal_handler(signal.SIGTERM)


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 - the system has no event for it
        await asyncio.sleep(PARENT_CHECK_S)
    log.warning("bulk.rq_worker_died pid=%d: the run returns to its RQ queue", parent)
    stop.set()
