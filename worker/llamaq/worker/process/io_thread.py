"""The I/O thread: one asyncio loop that claims jobs, flushes events, renews leases and sends heartbeats.

The engine thread never waits for the I/O thread while jobs run. The I/O thread shuts down in this order: the intake
ends, the last events are flushed, unfinished jobs are requeued, and the worker is removed from the list of workers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import LlamaqError
from llamaq.common.redis.connect import connect, dedicated_connection
from llamaq.common.redis.outage_log import OutageLog
from llamaq.worker.broker.heartbeat import Heartbeat
from llamaq.worker.broker.preparations import N_THREADS
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.process.broker_factory import BrokerFactory, BrokerServices, QueueAccess
from llamaq.worker.process.lost_errors import LostErrors
from llamaq.worker.process.redis_server_check import log_dangers, refuse_old_server
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
REGISTER_TIMEOUT_S = 5.0
"""How long the start of a worker waits for its first heartbeat."""
PREPARATIONS_TIMEOUT_S = 5.0
"""How long the end of a worker waits for preparations that still run. Their jobs are requeued by then."""
CONNECT_EVERY_S = 1.0


class IoThread:
    """Runs the Redis side of a worker on a separate thread.

    Threads: the engine thread calls the public methods and sets `has_crashed`; a signal handler may call
    `stop_intake`. Everything else runs on the I/O thread.
    """

    def __init__(
        self, settings: WorkerSettings, worker: str, broker: BrokerFactory, ticks: TickLoop, shared: SharedState
    ) -> None:
        """Create the object. `start` starts the thread.

        Args:
            settings: The queue, the Redis server, and the time limits.
            worker: The id of this worker.
            broker: Builds the services that the thread runs.
            ticks: The tick loop of the engine thread.
            shared: The objects that the I/O thread shares with the engine thread.
        """
        self._settings = settings
        self._worker = worker
        self._broker = broker
        self._ticks = ticks
        self._shared = shared
        self._executor = ThreadPoolExecutor(N_THREADS, thread_name_prefix="llamaq-prepare")
        self._ready: Future[None] = Future()
        """Done when the worker is in the list of workers, or when the thread has ended before that."""
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_intake_stopped = False
        """Whether `stop_intake` was called, perhaps before the thread had its loop. An `Event` would not do: a signal
        handler that interrupts another one would wait for the lock of the event forever."""
        self._intake_task: asyncio.Task[None] | None = None
        self._cancelling_intake: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="llamaq-io", daemon=True)
        self.error: BaseException | None = None
        """The error that ended the thread, if any."""
        self.has_crashed = False
        """Set when the engine thread ends with an error. Then the crash counts against each job without a stored
        token."""

    # ---- called on the engine thread

    def start(self) -> BaseException | None:
        """Start the thread and wait until the worker is in the list of workers.

        While Redis is unreachable, the wait has no time limit; `stop_intake` ends it.

        Returns:
            The error that ended the thread before that. None: there was no error.
        """
        self._thread.start()
        self._ready.result()
        return self.error

    def stop_intake(self) -> None:
        """Stop claiming jobs. Safe in a signal handler."""
        self._is_intake_stopped = True
        self._call_soon(self._cancel_intake)

    def close(self) -> None:
        """Flush the last events, requeue unfinished jobs, and end the thread, within `CLOSE_TIMEOUT_S`.

        A preparation that runs on another thread continues: `await_preparations` waits for it.
        """
        self._call_soon(self._closing.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def await_preparations(self) -> bool:
        """Wait up to `PREPARATIONS_TIMEOUT_S` until no thread uses the vocabulary of the model. Call `close` before.

        The threads that prepare jobs use it, and those that execute the text commands of clients. `llama_tokenize`
        cannot be interrupted, and takes seconds for a long text.

        Returns:
            Whether all of these threads have ended. If not, the model must not be freed.
        """
        deadline_s = time.monotonic() + PREPARATIONS_TIMEOUT_S
        # `shutdown` has no time limit, so it waits on a thread of its own.
        waiting = threading.Thread(target=self._executor.shutdown, name="llamaq-prepare-end", daemon=True)
        waiting.start()
        for thread in (waiting, self._thread):  # the I/O thread ends after the text commands
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not waiting.is_alive() and not self._thread.is_alive()

    def _call_soon(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(call)

    # ---- the I/O thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except LlamaqError as exc:
            self.error = exc
            log.error("worker.cannot_start error=%s", exc)
        except BaseException as exc:
            self.error = exc
            log.exception("io_thread.crashed")
        finally:
            if not self._ready.done():
                self._ready.set_result(None)  # `start` returns `error`
            self._ticks.stop(0)

    async def _serve(self) -> None:
        """Connect to Redis and serve the queue until the worker is closed."""
        self._loop = asyncio.get_running_loop()
        lost_errors = LostErrors(self._loop)
        if self._is_intake_stopped:  # before this thread could be told
            self._closing.set()
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
                await self._run_services(services, lost_errors)
        finally:
            await redis.aclose()

    async def _wait_for_queue(self, access: QueueAccess) -> bool:
        """Wait until Redis lets this worker join the queue. Returns False if the worker was stopped before that.

        Raises:
            InvalidSettings: The server is too old, or the settings of the queue do not allow this worker.
        """
        outage = OutageLog(log, "worker")
        while not self._closing.is_set():
            try:
                await access.redis.ping()
                await refuse_old_server(access.redis)
                await access.membership.join()
                await access.job_claims.open()
            except RedisError as exc:
                outage.record_failure(exc)
                await asyncio.sleep(CONNECT_EVERY_S)
            else:
                outage.record_success()
                return True
        return False

    async def _run_services(self, services: BrokerServices, lost_errors: LostErrors) -> None:
        """Register the worker, run its services until `close`, then write the last events and unregister the worker."""
        await self._register(services.heartbeat)
        async with asyncio.TaskGroup() as tasks:
            self._intake_task = tasks.create_task(services.intake.run())
            others = [tasks.create_task(service.run()) for service in (*services.after_intake, lost_errors)]
            self._ready.set_result(None)
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
        self._cancel_intake()
        self._ticks.stop(self._settings.drain_s)

    def _cancel_intake(self) -> None:
        if self._intake_task is not None:
            self._cancelling_intake = asyncio.create_task(cancel_tasks(self._intake_task))
        else:
            self._closing.set()  # Redis has not answered yet: there is nothing to drain

    async def _drain_and_unregister(self, services: BrokerServices) -> None:
        """Write the last events, requeue unfinished jobs, unregister the worker, and store the last stats.

        A step may fail: on a cluster, a partition does not answer, or a full Redis refuses stats. The next steps are
        tried nevertheless. A tenth of the time is kept for each of them. Each failed step is logged.
        """
        longest_s = CLOSE_TIMEOUT_S / 2
        deadline_s = asyncio.get_running_loop().time() + longest_s
        steps = {
            "write_events": services.outbox.close(crashed=self.has_crashed),
            "leave_queue": services.membership.leave(),
            "unregister": services.heartbeat.unregister(),
            "store_stats": services.stats.store(),
        }
        for n_tried, (name, step) in enumerate(steps.items(), 1):
            kept_s = (len(steps) - n_tried) * longest_s / 10
            try:
                async with asyncio.timeout_at(deadline_s - kept_s):
                    await step
            except (RedisError, TimeoutError) as exc:
                # No job is lost: other workers reclaim the jobs when their leases have expired.
                kind, n_jobs = type(exc).__name__, services.outbox.n_jobs
                log.warning("io_thread.close_failed step=%s jobs=%d error=%s %s", name, n_jobs, kind, exc)

    def __repr__(self) -> str:
        return f"<IoThread {self._worker} queue={self._settings.queue!r}>"
