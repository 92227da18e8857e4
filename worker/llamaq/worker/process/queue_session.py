"""The time of a worker in its queue: it joins the queue, runs the services of the Redis side, and leaves the queue.

The session ends in this order: the intake ends, the last events are flushed, unfinished jobs are requeued, and the
worker is removed from the list of workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.redis.connect import connect
from llamaq.common.redis.outage_log import OutageLog
from llamaq.worker.broker.dedicated_connection import dedicated_connection
from llamaq.worker.broker.heartbeat import Heartbeat
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.process.broker_factory import BrokerFactory, BrokerServices, QueueAccess
from llamaq.worker.process.lost_errors import LostErrors
from llamaq.worker.process.redis_server_check import log_dangers, refuse_old_server
from llamaq.worker.process.stop_times import LEAVE_TIMEOUT_S
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0
"""How long the start of a worker waits for its first heartbeat."""
CONNECT_EVERY_S = 1.0


class QueueSession:
    """Joins the queue, runs the services of the Redis side until it is closed, and leaves the queue.

    Threads: all methods run on the I/O thread.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        worker: str,
        broker: BrokerFactory,
        ticks: TickLoop,
        shared: SharedState,
        executor: Executor,
    ) -> None:
        """Create the session. `run` connects to Redis.

        Args:
            settings: The queue, the Redis server, and the time limits.
            worker: The id of this worker.
            broker: Builds the services.
            ticks: The tick loop of the engine thread.
            shared: The objects that the I/O thread shares with the engine thread.
            executor: Its threads prepare jobs that take long.
        """
        self._settings = settings
        self._worker = worker
        self._broker = broker
        self._ticks = ticks
        self._shared = shared
        self._executor = executor
        self._closing = asyncio.Event()
        self._has_crashed = False
        """Whether the engine thread has ended with an error."""
        self._intake_task: asyncio.Task[None] | None = None
        self._cancelling_intake: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Connect to Redis and serve the queue until the session is closed.

        Args:
            on_ready: Called when the worker is in the list of workers.

        Raises:
            InvalidSettings: The server is too old, or the settings of the queue do not allow this worker.
        """
        lost_errors = LostErrors(asyncio.get_running_loop())
        self._shared.telemetry.attach()
        # The client does not retry. Each service retries itself, so that an unreachable partition of a cluster does not
        # delay other partitions.
        redis = connect(self._settings.redis_url, name=f"llamaq-worker-{self._worker}", failover_s=0)
        try:
            access = self._broker.make_access(redis)
            if not await self._wait_for_queue(access):
                return
            await log_dangers(redis)
            # Flushes have a dedicated connection: fetching one from the pool costs as much as the flush.
            async with dedicated_connection(redis) as flush_connection:
                services = self._broker.make_services(access, flush_connection, self._executor, self._stop_by_itself)
                await self._run_services(services, lost_errors, on_ready)
        finally:
            await redis.aclose()

    def stop_intake(self) -> None:
        """Stop claiming jobs. A worker that still waits for Redis is closed."""
        if self._intake_task is not None:
            self._cancelling_intake = asyncio.create_task(cancel_tasks(self._intake_task))
        else:
            self._closing.set()  # Redis has not answered yet: there is nothing to drain

    def close(self, *, crashed: bool = False) -> None:
        """Let `run` write the last events, requeue unfinished jobs, leave the queue, and return.

        Args:
            crashed: Whether the engine thread has crashed. If so, the crash counts against each job without a stored
                token.
        """
        self._has_crashed = crashed
        self._closing.set()

    async def _wait_for_queue(self, access: QueueAccess) -> bool:
        """Wait until Redis lets this worker join the queue. Returns False if the worker was stopped before that.

        Raises:
            InvalidSettings: The server is too old, or the settings of the queue do not allow this worker.
        """
        outage = OutageLog(log, "worker")
        while not self._closing.is_set():
            try:
                await access.queue.redis.ping()
                await refuse_old_server(access.queue.redis)
                await access.membership.join()
                await access.job_claims.open()
            except RedisError as exc:
                outage.record_failure(exc)
                await asyncio.sleep(CONNECT_EVERY_S)
            else:
                outage.record_success()
                return True
        return False

    async def _run_services(
        self, services: BrokerServices, lost_errors: LostErrors, on_ready: Callable[[], None]
    ) -> None:
        """Register the worker, run its services until `close`, then write the last events and unregister the worker."""
        await self._register(services.heartbeat)
        async with asyncio.TaskGroup() as tasks:
            self._intake_task = tasks.create_task(services.intake.run())
            others = [tasks.create_task(service.run()) for service in (*services.after_intake, lost_errors)]
            on_ready()
            await self._closing.wait()
            await cancel_tasks(self._intake_task, *others)
        await services.intake.close()
        await services.job_claims.close()
        await self._drain_and_unregister(services)

    async def _register(self, heartbeat: Heartbeat) -> None:
        """Send the first heartbeat. On a cluster, the node with the list of workers may not answer."""
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                await heartbeat.beat()
        except (RedisError, TimeoutError) as exc:
            log.warning("worker.not_listed error=%s: the next heartbeat tries again", exc)

    def _stop_by_itself(self) -> None:
        """Stop the worker because its queue is empty. A job that it has just claimed may finish within `drain_s`."""
        self.stop_intake()
        self._ticks.stop(self._settings.drain_s)

    async def _drain_and_unregister(self, services: BrokerServices) -> None:
        """Write the last events, requeue unfinished jobs, unregister the worker, and store the last stats.

        A step may fail: on a cluster, a partition does not answer, or a full Redis refuses stats. The next steps are
        tried nevertheless. A tenth of the time is kept for each of them. Each failed step is logged.
        """
        deadline_s = asyncio.get_running_loop().time() + LEAVE_TIMEOUT_S
        steps = {
            "write_events": services.outbox.close(crashed=self._has_crashed),
            "leave_queue": services.membership.leave(),
            "unregister": services.heartbeat.unregister(),
            "store_stats": services.stats.store(),
        }
        for n_tried, (name, step) in enumerate(steps.items(), 1):
            kept_s = (len(steps) - n_tried) * LEAVE_TIMEOUT_S / 10
            try:
                async with asyncio.timeout_at(deadline_s - kept_s):
                    await step
            except (RedisError, TimeoutError) as exc:
                # No job is lost: other workers reclaim the jobs when their leases have expired.
                kind, n_jobs = type(exc).__name__, services.outbox.n_jobs
                log.warning("io_thread.close_failed step=%s jobs=%d error=%s %s", name, n_jobs, kind, exc)

    def __repr__(self) -> str:
        return f"<QueueSession {self._worker} queue={self._settings.queue!r}>"
