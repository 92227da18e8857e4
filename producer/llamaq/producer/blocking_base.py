"""The hand-written base classes of the blocking client.

They start the client's portal, start another one after a fork, and run the client's calls.
The generated module `llamaq.producer.sync` adds one method for each method of `AsyncClient`, `AsyncJob` and
`AsyncStream`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from llamaq.common.errors import RequestFailed
from llamaq.common.protocol.keys import JobId
from llamaq.producer.auto_cancelled_stream import AsyncStream
from llamaq.producer.blocking_map import blocking_map
from llamaq.producer.blocking_portal import BlockingPortal, next_or_none
from llamaq.producer.client import AsyncClient
from llamaq.producer.job_handle import AsyncJob, Chunk
from llamaq.producer.job_window.request_map import MappedResult, MapRequest

T = TypeVar("T")

OpenedStream = tuple[BlockingPortal, AsyncStream]
"""A stream of the asyncio client, and the portal that it runs in."""

_start_lock = threading.Lock()
_portals_of_parent: list[BlockingPortal] = []
"""Portals that a parent process created. They are kept forever, because closing their event loops in this process
would unregister the parent's sockets."""


_portals: WeakSet[BlockingPortal] = WeakSet()
"""The portals of clients that were not garbage collected."""


def _stop_portals() -> None:
    """Stop the portals at the exit of the interpreter. This cancels the jobs of open streams and calls."""
    for portal in list(_portals):
        portal.stop()


# These functions run before those of `atexit`. Since Python 3.12 no thread can start during the functions of `atexit`,
# but asyncio starts a thread to resolve a host name and to close its loop. Functions that are registered later run
# earlier. Therefore the executor threads are imported first. A child process of `multiprocessing` also runs these
# functions, but not those of `atexit`.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_stop_portals)


def _replace_lock() -> None:
    """Create a new lock in a child process: another thread of the parent may have held the old lock at the fork."""
    global _start_lock  # noqa: PLW0603
    _start_lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)


class BlockingClient:
    """Base of `Client`. The first call starts a thread that runs an `AsyncClient`."""

    def __init__(self, client: AsyncClient) -> None:
        """Copy the settings of `client`. Calls use another client, which each process creates in a separate thread."""
        self.settings = client.settings
        self.queue = client.queue
        self._portal: BlockingPortal | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self._portal or "idle"
        return f"<{type(self).__name__} queue={self.queue!r} {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls of other threads, close all streams and connections, and end the thread.

        Jobs of `submit` keep running.
        """
        self._is_closed = True
        if self._portal is not None:
            self._portal.stop()

    def _call(self, call: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run one call of the asyncio client and return its result."""
        portal = self._running_portal()
        return portal.run(lambda: call(portal.client))

    def _iterate(self, call: Callable[[AsyncClient], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Return an iterator over the items of one call. This method checks the arguments before it returns."""
        portal = self._running_portal()
        return self._iterate_through(portal, call(portal.client))

    def _iterate_through(self, portal: BlockingPortal, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        # A method, so that the generator keeps a reference to this client: `for chunk in Client().stream("x")`.
        yield from portal.iterate(items)

    def _map(
        self, requests: Iterable[MapRequest] | AsyncIterable[MapRequest], **arguments: Any
    ) -> Generator[MappedResult | RequestFailed, None, None]:
        # A generator of its own: it keeps a reference to this client, as in `_iterate_through`.
        yield from blocking_map(self._running_portal(), requests, **arguments)

    def _open(self, call: Callable[[AsyncClient], Coroutine[Any, Any, AsyncStream]]) -> OpenedStream:
        """Run one call of the asyncio client that returns a stream."""
        portal = self._running_portal()
        return portal, portal.run(lambda: call(portal.client))

    def _running_portal(self) -> BlockingPortal:
        """Return the portal of this process, and start it if needed.

        Raises:
            RuntimeError: The client is closed.
        """
        if self._is_closed:
            raise RuntimeError("this client is closed")
        if self._portal is not None and self._portal.is_of_this_process:
            return self._portal
        with _start_lock:
            if self._portal is None or not self._portal.is_of_this_process:
                if self._portal is not None:
                    _portals_of_parent.append(self._portal)
                self._portal = BlockingPortal(self._make_client)
                _portals.add(self._portal)
                weakref.finalize(self, self._portal.stop)  # stops the thread when the client is garbage collected
        return self._portal

    def _make_client(self) -> AsyncClient:
        settings = self.settings.model_dump(exclude={"redis_url", "queue"})
        return AsyncClient(self.settings.redis_url, self.settings.queue, **settings)


class BlockingStream:
    """Base of `Stream`."""

    def __init__(self, client: BlockingClient, opened: OpenedStream, job_class: type[BlockingJob]) -> None:
        self._client = client  # a reference: `for chunk in Client().stream("x")`
        self._portal, self._stream = opened
        job = self._stream.job
        self.job = job_class(client, job.id, is_new=job.is_new, is_shared=job.is_shared)

    def __repr__(self) -> str:
        return repr(self._stream).replace(type(self._stream).__name__, type(self).__name__)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._portal.run(lambda: next_or_none(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def started(self) -> None:
        """Wait until the first chunk has arrived or the job has ended. The iteration then begins with this chunk.

        A web backend calls this method before it starts a response. So it can answer all errors before the first chunk
        with a status.

        Raises:
            JobFailed: The job failed before its first chunk; `code` and `message` give the reason.
            NoWorker: The timeout was reached, and no worker serves the queue; or the client has `require_worker`.
            ResultTimeout: The timeout was reached.
        """
        self._portal.run(self._stream.started)

    def close(self) -> None:
        """End the stream. If its job has not ended, cancel it and wait until the cancellation is sent."""
        self._portal.close_iterator(self._stream)

    def _iterate(self, call: Callable[[AsyncStream], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Return an iterator over the items of one call."""
        yield from self._portal.iterate(call(self._stream))


class BlockingJob:
    """Base of `Job`."""

    def __init__(self, client: BlockingClient, job_id: str, *, is_new: bool = False, is_shared: bool = False) -> None:
        self.id = str(JobId.parse(job_id))
        """The job id. It contains the queue and the partition, so another process needs only this id."""
        self.is_new = is_new
        """Whether `submit` created the job. False if its idempotency key already had a job, or after `client.job()`."""
        self.is_shared = is_shared
        """Whether `submit` had an idempotency key, through which other callers may get the same job."""
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def _call(self, call: Callable[[AsyncJob], Coroutine[Any, Any, T]]) -> T:
        """Run one call of the asyncio job and return its result."""
        return self._client._call(lambda client: call(self._handle(client)))

    def _iterate(self, call: Callable[[AsyncJob], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Return an iterator over the items of one call."""
        return self._client._iterate(lambda client: call(self._handle(client)))

    def _handle(self, client: AsyncClient) -> AsyncJob:
        return AsyncJob(client.connection, self.id, is_new=self.is_new, is_shared=self.is_shared)
