"""The I/O thread: one asyncio loop that claims jobs, flushes events, renews leases and sends heartbeats.

`QueueSession` is what runs on the thread. The engine thread never waits for the I/O thread while jobs run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from llamaq.common.errors import LlamaqError
from llamaq.worker.broker.preparations import N_THREADS
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.process.broker_factory import BrokerFactory
from llamaq.worker.process.queue_session import QueueSession
from llamaq.worker.process.stop_times import LEAVE_TIMEOUT_S
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2 * LEAVE_TIMEOUT_S
"""How long `close` waits at most for the end of the thread."""
PREPARATIONS_TIMEOUT_S = 5.0
"""How long the end of a worker waits for preparations that still run. Their jobs are requeued by then."""


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
        self._ticks = ticks
        self._executor = ThreadPoolExecutor(N_THREADS, thread_name_prefix="llamaq-prepare")
        self._session = QueueSession(settings, worker, broker, ticks, shared, self._executor)
        self._ready: Future[None] = Future()
        """Done when the worker is in the list of workers, or when the thread has ended before that."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_intake_stopped = False
        """Whether `stop_intake` was called, perhaps before the thread had its loop. An `Event` would not do: a signal
        handler that interrupts another one would wait for the lock of the event forever."""
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
        self._call_soon(self._session.stop_intake)

    def close(self) -> None:
        """Flush the last events, requeue unfinished jobs, and end the thread, within `CLOSE_TIMEOUT_S`.

        A preparation that runs on another thread continues: `await_preparations` waits for it.
        """
        self._call_soon(partial(self._session.close, crashed=self.has_crashed))
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
        """Serve the queue until the worker is closed."""
        self._loop = asyncio.get_running_loop()
        if self._is_intake_stopped:  # before this thread could be told
            self._session.close()
        await self._session.run(on_ready=lambda: self._ready.set_result(None))

    def __repr__(self) -> str:
        return f"<IoThread {self._session!r}>"
