"""The I/O thread: one asyncio loop that claims jobs, flushes events, renews leases and beats the heart.

The engine thread never waits for it. It ends in order: intake first, then the last flush, then what is left is
handed back, and the worker leaves the list.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_state import WorkerCard
from llamaq.common.protocol.scripts import Scripts
from llamaq.common.redis.connect import connect, own_connection
from llamaq.worker.broker.command_inbox import CommandHandler, CommandInbox
from llamaq.worker.broker.heartbeat import Heartbeat
from llamaq.worker.broker.inbox import Inbox
from llamaq.worker.broker.intake import Intake
from llamaq.worker.broker.job_progress import Checkpoints
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

PREPARERS = 2
"""Threads that tokenize and compile grammars: one may be held up by a grammar while the other goes on."""
CLOSE_TIMEOUT_S = 10.0
CONNECT_EVERY_S = 1.0


class IoThread:
    """A worker's connection to its queue, on a thread of its own."""

    def __init__(
        self,
        settings: WorkerSettings,
        card: WorkerCard,
        vocab_blob: bytes,
        preparer: JobPreparer,
        ticks: TickLoop,
        telemetry: Telemetry,
        control: CommandHandler,
    ) -> None:
        self._settings = settings
        self._card = card
        self._vocab_blob = vocab_blob
        self._preparer = preparer
        self._ticks = ticks
        self._telemetry = telemetry
        self._control = control
        self._executor = ThreadPoolExecutor(PREPARERS, thread_name_prefix="llamaq-prepare")
        self._ready: Future[None] = Future()
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._intake_task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="llamaq-link", daemon=True)
        self.error: BaseException | None = None
        """What ended the thread before its time."""
        self.has_crashed = False
        """Set when the engine thread ends with an error: that counts as the worker's death."""

    # ---- called from the engine thread

    def start(self) -> BaseException | None:
        """Start the thread and wait until the worker is listed, or return what went wrong.

        Waits for Redis as long as it takes, or until `stop_intake`.
        """
        self._thread.start()
        self._ready.result()
        return self.error

    def stop_intake(self) -> None:
        """Claim no more jobs. Safe in a signal handler."""
        self._call_soon(self._cancel_intake)

    def close(self) -> None:
        """Write what there is, hand the rest back, and leave; a few seconds at most."""
        self._call_soon(self._closing.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _call_soon(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended already
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
            log.exception("link.crashed")
        finally:
            if not self._ready.done():
                self._ready.set_result(None)  # `error` says whether anything was wrong
            self._ticks.stop(0)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._telemetry.attach(self._loop)
        settings, keys = self._settings, Keys(self._settings.key_prefix)
        # Its own loops try again, each for itself: a part of a cluster that is away shall not keep the others waiting.
        redis = connect(settings.redis_url, name=f"llamaq-worker-{self._card.worker}", failover_s=0)
        try:
            if not await self._wait_for_redis(redis):
                return
            inbox = Inbox(
                redis,
                keys,
                queue=settings.queue,
                partitions=settings.partitions,
                worker_id=self._card.worker,
                lease_s=settings.lease_s,
                max_crashes=settings.max_crashes,
            )
            await inbox.open(max_queue=settings.max_queue)
            # Flushes have a connection of their own: to fetch one from the pool costs as much as the call.
            async with own_connection(redis) as flushing:
                await self._work(redis, Scripts(flushing, keys), keys, inbox)
        finally:
            await redis.aclose()

    async def _wait_for_redis(self, redis: Redis) -> bool:
        """True when Redis answers; False when the worker was stopped before."""
        while not self._closing.is_set():
            try:
                await redis.ping()
                return True
            except RedisError as exc:
                log.warning("redis.unreachable error=%s retry_s=%.0f", exc, CONNECT_EVERY_S)
                await asyncio.sleep(CONNECT_EVERY_S)
        return False

    async def _work(self, redis: Redis, scripts: Scripts, keys: Keys, inbox: Inbox) -> None:
        settings = self._settings
        heartbeat = Heartbeat(
            redis,
            keys,
            self._card,
            self._vocab_blob,
            self._ticks,
            self._telemetry,
            partitions=settings.partitions,
            every_s=settings.heartbeat_s,
            is_alive=lambda: self._ticks.is_alive,
        )
        outbox = Outbox(
            scripts,
            self._card.worker,
            self._ticks,
            lease_s=settings.lease_s,
            disconnect_s=settings.disconnect_s,
            checkpoints=Checkpoints(settings.checkpoint_tokens, settings.checkpoint_s),
            is_alive=lambda: self._ticks.is_alive,
            on_finished=heartbeat.record,
        )
        self._ticks.put, self._ticks.give_up = outbox.put, outbox.give_up
        capacity = settings.n_parallel + settings.inbox_window
        intake = Intake(
            inbox,
            outbox,
            self._preparer,
            self._executor,
            self._ticks.admit,
            capacity=capacity,
            lease_s=settings.lease_s,
            is_alive=lambda: self._ticks.is_alive,
        )
        await heartbeat.beat()
        async with asyncio.TaskGroup() as tasks:
            self._intake_task = tasks.create_task(intake.run())
            orders = CommandInbox(redis, keys, self._card.worker, self._control)
            others = [tasks.create_task(task.run()) for task in (outbox, heartbeat, orders)]
            self._ready.set_result(None)
            await self._closing.wait()
            await cancel_tasks(self._intake_task, *others)
        await intake.close()
        await self._part(inbox, outbox, heartbeat)

    def _cancel_intake(self) -> None:
        if self._intake_task is not None:
            self._ending = asyncio.create_task(cancel_tasks(self._intake_task))
        else:
            self._closing.set()  # still waiting for Redis: there is nothing to drain

    async def _part(self, inbox: Inbox, outbox: Outbox, heartbeat: Heartbeat) -> None:
        """The last words: every job is written, or handed back."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S / 2):
                await outbox.close(crashed=self.has_crashed)
                await inbox.close()
                await heartbeat.leave()
        except (RedisError, TimeoutError) as exc:
            # Nothing is lost: another worker takes over when the leases are over.
            log.warning("link.left_without_goodbye jobs=%d error=%r", outbox.n_open, exc)
