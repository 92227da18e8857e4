"""Notices that the process of an RQ job, the work-horse, must end: by a signal, without its RQ worker, or cancelled."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.producer.rq.library import Job
from llamaq.producer.rq.withdrawn_run import is_withdrawn

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Time between two checks of the RQ worker, and of the RQ job."""


def is_work_horse(job_id: str) -> bool:
    """Return whether this process was forked to execute this one RQ job. RQ sets the variable only there."""
    return os.environ.get("RQ_JOB_ID") == job_id


class Interruption:
    """Whether the run of a work-horse must stop.

    Args:
        job: The RQ job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.stop = asyncio.Event()
        """Set when the run must stop."""

    async def check(self) -> bool:
        """Set `stop` if the RQ job of this work-horse was cancelled or replaced, and return whether it was.

        The jobs of a cancelled run are cancelled after its RQ job. A work-horse that got no processor time meanwhile
        sees cancelled jobs first.

        Raises:
            RedisError: RQ's Redis does not answer.
        """
        if not is_work_horse(self._job.id) or not await asyncio.to_thread(is_withdrawn, self._job):
            return False
        if not self.stop.is_set():
            log.warning("bulk.run_withdrawn rq_job=%s: it was cancelled, so its process ends", self._job.id)
            self.stop.set()
        return True


@asynccontextmanager
async def interruption(job: Job) -> AsyncIterator[Interruption]:
    """Yield an interruption. Its event is set when the work-horse receives SIGTERM, when its RQ worker has died, or
    when the RQ job was cancelled or replaced.

    Without its RQ worker, a work-horse sends no heartbeat and receives no stop command, and RQ would soon let another
    worker start the same job. A job that is cancelled while its RQ worker does not react is stopped by its work-horse.
    In a process that is not a work-horse, the event is never set.

    Args:
        job: The RQ job.
    """
    interrupted = Interruption(job)
    if not is_work_horse(job.id):
        yield interrupted
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, interrupted.stop.set)
    watching = [
        asyncio.create_task(_watch_parent(os.getppid(), interrupted.stop)),
        asyncio.create_task(_watch_job(interrupted)),
    ]
    try:
        yield interrupted
    finally:
        await cancel_tasks(*watching)
        loop.remove_signal_handler(signal.SIGTERM)


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 - the system has no event for it
        await asyncio.sleep(CHECK_S)
    log.warning("bulk.rq_worker_died pid=%d: the run returns to its RQ queue", parent)
    stop.set()


async def _watch_job(interrupted: Interruption) -> None:
    while not interrupted.stop.is_set():
        await asyncio.sleep(CHECK_S)
        with suppress(RedisError, OSError):
            await interrupted.check()


def end_work_horse(job_id: str) -> None:
    """End this process if it is the work-horse of an RQ job, so that RQ writes no end of the job."""
    if is_work_horse(job_id):
        os._exit(os.EX_OK)
