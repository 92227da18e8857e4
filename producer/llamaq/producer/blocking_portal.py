"""A thread with an event loop, in which a blocking client runs its `AsyncClient`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import wait
from typing import Any, Generic, NoReturn, TypeVar

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.redis.shared_round_trips import CLOSED
from llamaq.producer.client import AsyncClient
from llamaq.producer.open_calls import Closable

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
"""Longest wait for the thread in `stop`."""
CANCEL_TIMEOUT_S = 5.0
"""Longest time that an interrupted call waits until the cancellation of its job is sent."""


class PortalStopped(RuntimeError):
    """The portal was stopped before or during a call."""


class BlockingPortal:
    """Runs coroutines of one `AsyncClient` for other threads, in a daemon thread that `stop` ends."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self._iterated: set[Closable] = set()
        """What `closing` has not closed yet."""
        # Other threads use these two without a lock: the garbage collector may call `close_iterator` in any line, also
        # in one that holds a lock. `run` adds its call before it reads `_is_stopped`. The loop's thread writes
        # `_is_stopped` before it reads the calls. So at least one of the two sees that a call cannot run any more.
        self._open_calls: set[_Call[Any]] = set()
        """The calls that other threads wait for."""
        self._is_stopped = False
        """Whether the loop has ended: it starts no call, and ends none."""
        self.client = make_client()
        self._thread = threading.Thread(target=self._run_loop, name="llamaq-client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "stopped" if self._loop.is_closed() else f"running={len(self._running)}"
        return f"<BlockingPortal pid={self._pid} {state}>"

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process created the portal. False in a child process: a fork does not copy the thread."""
        return self._pid == os.getpid()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `work` returns in the event loop, and return its result.

        An exception that is raised in the waiting thread (Ctrl-C, a signal handler, a job timeout of RQ) cancels the
        coroutine. It is raised after the coroutine has ended and the cancellation of its job is sent.

        Raises:
            PortalStopped: The portal is stopped, or another thread stopped it during the call.
            RuntimeError: This is a child process. Clients start a portal of their own there, but streams do not.
        """
        if not self.is_of_this_process:
            raise RuntimeError(
                f"process {self._pid} opened this stream or iterator before the fork: open it again in this process, "
                "for example with client.job(job_id).stream()"
            )
        call = _Call(work)
        try:
            self._pass_to_loop(call)
            call.unfinished.acquire()
            return call.result()
        except PortalStopped:
            raise
        except asyncio.CancelledError:
            _raise_stopped()
        except BaseException:
            if not call.has_finished:
                self._abandon(call)
            raise
        finally:
            self._open_calls.discard(call)

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an async generator. Closing this generator early closes the async generator too."""
        with self.closing(items):
            while True:
                item = self.run(lambda: next_or_none(items))
                if item is None:
                    return
                yield item

    @contextlib.contextmanager
    def closing(self, items: Closable) -> Iterator[None]:
        """Close an object of the event loop at the end of the context, or when the portal is stopped before."""
        self._iterated.add(items)
        try:
            yield
        finally:
            with contextlib.suppress(PortalStopped):
                self._close(items)
                self._iterated.discard(items)

    def close_iterator(self, items: Closable) -> None:
        """Close an object of the loop. The garbage collector calls this in any thread, even after the loop closed.

        While the portal stops, this does nothing: the portal closes its client, which ends all streams.
        """
        with contextlib.suppress(PortalStopped):
            self._close(items)

    def _close(self, items: Closable) -> None:
        """Close an object of the loop.

        Raises:
            PortalStopped: The portal is stopping: it closes the objects of `_iterated` itself.
        """
        if not self.is_of_this_process or self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:
            self._loop.create_task(_aclose(items))
        else:
            self.run(lambda: _aclose(items))

    def stop(self) -> None:
        """Cancel running calls, close the client and end the thread.

        A second call does nothing. A call in a child process after a fork does nothing either.
        """
        if not self.is_of_this_process:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)

    def _pass_to_loop(self, call: _Call[Any]) -> None:
        """Let the loop start a call.

        Raises:
            PortalStopped: The loop has ended.
        """
        self._open_calls.add(call)
        if self._is_stopped:
            raise PortalStopped("this client is closed")
        try:
            self._loop.call_soon_threadsafe(self._start, call)
        except RuntimeError:
            raise PortalStopped("this client is closed") from None

    def _start(self, call: _Call[Any]) -> None:
        if self._stopping.is_set():  # `_run_until_stopped` does not see tasks that start from now on
            call.fail()
            return
        call.task = task = self._loop.create_task(call.perform())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(call.finish)

    def _abandon(self, call: _Call[Any]) -> None:
        """Cancel a call and wait until it has ended, because its caller was interrupted."""
        cancelling = self._cancel(call)
        try:
            wait([asyncio.run_coroutine_threadsafe(cancelling, self._loop)], CANCEL_TIMEOUT_S)
        except RuntimeError:  # the loop is closed
            cancelling.close()

    async def _cancel(self, call: _Call[Any]) -> None:
        if call.task is None:  # the interrupt came before the call was passed to the loop
            return
        call.task.cancel()
        await asyncio.wait([call.task])
        await self.client.auto_cancelled.wait_for_cancellations()

    def _run_loop(self) -> None:
        # `asyncio.Runner` is not used, because it starts a thread to end the threads that resolved host names. Since
        # Python 3.12 no thread can start at the exit of the interpreter. `close` also ends these threads, but does not
        # wait for them.
        try:
            self._loop.run_until_complete(self._run_until_stopped())
        finally:
            self._is_stopped = True
            for call in list(self._open_calls):
                call.fail()
            self._loop.close()

    async def _run_until_stopped(self) -> None:
        await self._stopping.wait()
        # The client is closed last: the cancelled calls still need its connections to cancel their jobs.
        # Each call is cancelled once only: a second cancellation could stop it before it has cancelled its job.
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        # `loop.shutdown_asyncgens` is not called: it would also close generators of redis-py that cancellations in
        # flight use.
        await asyncio.gather(*(items.aclose() for items in list(self._iterated)), return_exceptions=True)
        await self.client.aclose()
        await cancel_tasks(*asyncio.all_tasks() - {asyncio.current_task()})
        await self._loop.shutdown_asyncgens()


class _Call(Generic[T]):
    """A coroutine that another thread waits for. The loop creates the coroutine, so an interrupt never leaves it
    unawaited.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.work = work
        self.unfinished = threading.Lock()
        """Locked until the coroutine has ended. If a signal handler raises an exception during a wait for this lock,
        that exception is raised unchanged. During a wait for a future, it may become a RuntimeError about the lock of
        the future."""
        self.unfinished.acquire()
        self.has_finished = False
        self.result: Callable[[], T]
        """Returns the result or raises the error, when the coroutine has ended."""
        self.task: asyncio.Task[T] | None = None
        """Runs `work`. None: the loop has not started it yet."""

    async def perform(self) -> T:
        """Run the coroutine."""
        return await self.work()

    def finish(self, task: asyncio.Task[T]) -> None:
        """Wake the waiting thread."""
        if not task.cancelled():
            task.exception()  # if the waiting thread was interrupted, it does not ask for the error
        self.result = task.result
        self._wake()

    def fail(self) -> None:
        """Wake the waiting thread with a `PortalStopped`, because the loop does not end the coroutine any more."""
        if not self.has_finished:
            self.result = _raise_stopped
            self._wake()

    def _wake(self) -> None:
        self.has_finished = True
        self.unfinished.release()


def _raise_stopped() -> NoReturn:
    raise PortalStopped(CLOSED) from None


async def next_or_none(items: AsyncIterator[T]) -> T | None:
    """Return the next item, or None at the end."""
    return await anext(items, None)


async def _aclose(items: Closable) -> None:
    await items.aclose()
