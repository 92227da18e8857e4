"""The mailbox that passes the outputs of jobs from the publishing thread to the I/O thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from llamaq.worker.core.job import BaseJob
from llamaq.worker.core.outputs import Output


@dataclass(frozen=True, slots=True)
class JobWithdrawn:
    """Reports that the scheduler has withdrawn a job without a slot. The job is requeued for other workers."""

    job: BaseJob


Message = Output | JobWithdrawn
Receiver = Callable[[Sequence[Message]], None]


class OutputMailbox:
    """Carries messages from the publishing thread to the I/O thread, in the order in which they were put.

    Threads: the publishing thread calls `put`, which never blocks. The I/O thread calls `attach`, and the receiver runs
    on the I/O thread. Messages that are put before `attach` are delivered after it.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Sequence[Message]] = queue.SimpleQueue()
        self._receive: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, messages: Sequence[Message]) -> None:
        """Add messages. Called on the publishing thread."""
        if not messages:
            return
        self._messages.put(messages)
        # `attach` sets the loop before it schedules a delivery, so a message that is put in between is delivered.
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                self._loop.call_soon_threadsafe(self._deliver)

    def attach(self, receive: Receiver) -> None:
        """Deliver all messages to `receive`, on the running event loop. Called on the I/O thread."""
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        if self._receive is None:
            raise RuntimeError("messages are delivered only after `attach`")
        with suppress(queue.Empty):
            while True:
                self._receive(self._messages.get_nowait())

    def __repr__(self) -> str:
        return f"<OutputMailbox {self._messages.qsize()} undelivered>"
