"""The RQ worker that executes bulk runs, which take hours: `llamaq bulk worker`."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from llamaq.common.backoff import Backoff
from llamaq.producer.rq.bulk_jobs import ERROR_KEY
from llamaq.producer.rq.library import (
    AtomicRetryJob,
    Job,
    JSONSerializer,
    Queue,
    RQScheduler,
    StopRequested,
    Worker,
    parse_payload,
)
from llamaq.producer.rq.withdrawn_run import SUBMITTED_KEY, is_withdrawn, submit_time

log = logging.getLogger(__name__)

HEARTBEAT_S = 5
"""Seconds between two heartbeats of a run."""
HEARTBEAT_TTL_S = 30
"""Seconds without a heartbeat after which a run counts as abandoned."""
WORKER_TTL_S = 17
"""One wait of RQ for a job takes 15 s less than this. Between two waits, runs that are due are put into the queue."""
MAINTENANCE_S = 1
CLEAN_EVERY_S = 15
"""Seconds between two searches for abandoned runs."""
LOCK_S = 60
"""Longest time of a search for abandoned runs in which no other RQ worker searches."""
RESTART_S, MAX_RESTART_S = 1.0, 15.0
"""Bounds of the time until a worker that ended without a signal is replaced."""


class ShortLockQueue(Queue):
    """An RQ queue. RQ locks its maintenance for 15 minutes, and an RQ worker that loses its connection meanwhile does
    not release this lock: in this time, no RQ worker would find an abandoned run.
    """

    def acquire_maintenance_lock(self) -> bool:
        """Return whether this RQ worker may search for abandoned jobs now."""
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=LOCK_S))


class BulkWorker(Worker):
    """An RQ worker with the JSON serializer, which unpickles nothing.

    - SIGTERM stops the run at a row and puts the run back into the RQ queue. RQ's own worker would wait for the end of
      the run.
    - The run of a worker that was killed is continued by another worker about a minute later.
    - Runs for later (`--at`, retries with a delay) get into the queue without a scheduler process.
    - An outage of RQ's Redis does not end the worker while a run continues.
    - It writes no end of a run that was cancelled meanwhile, and ignores a late stop of such a run. The run may have
      been submitted again, and RQ would end the new run.
    """

    def __init__(self, queue: str, connection: Redis) -> None:
        super().__init__(
            [queue],
            connection=connection,
            serializer=JSONSerializer,
            job_class=AtomicRetryJob,
            queue_class=ShortLockQueue,
            job_monitoring_interval=HEARTBEAT_S,
            maintenance_interval=MAINTENANCE_S,
            worker_ttl=WORKER_TTL_S,
            work_horse_killed_handler=keep_progress,
        )
        self.is_stopping = False
        """Whether a signal has told the worker to end."""
        self.is_done = False
        """Whether the worker has found its queue empty, with `burst`."""
        self._scheduler = RQScheduler(
            [queue], connection=connection, serializer=JSONSerializer, logging_level="WARNING"
        )
        self._cleaned_at: datetime | None = None
        self._job: Job | None = None
        """The job that is executed now, or was executed last."""

    def get_heartbeat_ttl(self, *_: Any, **__: Any) -> int:
        """Return the seconds after which a run without a heartbeat counts as abandoned."""
        return HEARTBEAT_TTL_S

    def maintain_heartbeats(self, *args: Any, **kwargs: Any) -> None:
        """Send the heartbeats of the worker and of its run."""
        try:
            super().maintain_heartbeats(*args, **kwargs)
        except (RedisError, OSError) as exc:
            log.warning("rq_worker.no_heartbeat error=%s", exc)

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Execute a run."""
        # RQ keeps this id if a run ends by itself just before its stop. It would not try the next run of this id again.
        self._stopped_job_id = None
        self._job = job
        super().execute_job(job, queue)

    def handle_payload(self, message: dict[str, Any]) -> None:
        """Handle a command, such as the stop of a run."""
        asked = parse_payload(message).get(SUBMITTED_KEY)
        if asked is not None and (self._job is None or asked != submit_time(self._job)):
            log.warning("rq_worker.stop_ignored name=%s: the run was submitted again", self.name)
            return
        super().handle_payload(message)

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the work-horse and to its children.

        RQ sends it to the RQ worker and its whole process group if there is no work-horse, or if the work-horse was
        forked just now and has no group of its own yet.
        """
        horse = self.horse_pid
        if not horse:
            return
        with suppress(ProcessLookupError):
            if os.getpgid(horse) == os.getpgrp():
                os.kill(horse, sig)
            else:
                os.killpg(horse, sig)

    def handle_job_failure(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """Write that a run has failed or was stopped, or try it again."""
        if not self._is_withdrawn(job):
            super().handle_job_failure(job, *args, **kwargs)

    def handle_job_retry(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """Put a run back into the queue."""
        if not self._is_withdrawn(job):
            super().handle_job_retry(job, *args, **kwargs)

    def handle_job_success(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """Write that a run is complete."""
        if not self._is_withdrawn(job):
            super().handle_job_success(job, *args, **kwargs)

    def _is_withdrawn(self, job: Job) -> bool:
        try:
            is_ignored = is_withdrawn(job)
        except (RedisError, OSError):  # RQ finds out too that it cannot write
            return False
        if is_ignored:
            log.warning("rq_worker.end_ignored rq_job=%s: the run was cancelled", job.id)
        return is_ignored

    def run_maintenance_tasks(self) -> None:
        """Put runs that are due into the queue, and search for abandoned ones."""
        self._scheduler.acquire_locks()
        if self._scheduler.acquired_locks:
            self._scheduler.enqueue_scheduled_jobs()
            self._scheduler.release_locks()  # this worker will soon be busy for hours
        self.last_cleaned_at = now = datetime.now(UTC)
        if self._cleaned_at is None or (now - self._cleaned_at).total_seconds() >= CLEAN_EVERY_S:
            self._cleaned_at = now
            super().run_maintenance_tasks()

    def dequeue_job_and_maintain_ttl(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next job and its queue. None: there is none, with `burst`."""
        found = super().dequeue_job_and_maintain_ttl(*args, **kwargs)
        self.is_done = found is None
        return found

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """End the worker after its run has returned to the queue."""
        self.is_stopping = True
        super().request_stop(signum, frame)

    def handle_warm_shutdown_request(self) -> None:
        """Let the work-horse stop its run."""
        if self.horse_pid:
            self.kill_horse(signal.SIGTERM)


def keep_progress(job: Job, _: int, wait_status: int, *__: Any) -> None:
    """Read the progress that a killed work-horse has stored, because RQ writes the whole job again.

    RQ calls this function before it decides whether to try the job again.
    """
    job.get_meta(refresh=True)
    job.meta[ERROR_KEY] = f"the work-horse was killed (signal {os.WTERMSIG(wait_status)})"


def serve(make_worker: Callable[[], BulkWorker], *, burst: bool = False) -> None:
    """Run an RQ worker until a signal ends it. With `burst`, until the queue is empty.

    If Redis does not answer, the worker waits for it. RQ's worker ends when its Redis cannot be reached at the end of a
    job. Then a new worker replaces it.
    """
    backoff = Backoff(RESTART_S, MAX_RESTART_S)
    worker = None
    while worker is None or not worker.is_stopping:
        try:
            worker = make_worker()
            log.info("rq_worker.ready name=%s rq_queue=%s", worker.name, ",".join(worker.queue_names()))
            worker.work(burst=burst, logging_level="WARNING")
            if worker.is_stopping or (burst and worker.is_done):
                return
            backoff.reset()
        except (RedisError, OSError) as exc:
            log.warning("rq_worker.disconnected error=%s", exc)
        with suppress(StopRequested):  # a signal during the pause: its handler is still that of the last worker
            time.sleep(backoff.next_delay_s())
