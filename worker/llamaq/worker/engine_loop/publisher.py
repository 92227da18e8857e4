"""Publishes what the ticks have produced, on its own thread, while the engine thread computes the next batch.

To publish means to wake the I/O thread, which then needs the GIL for up to a few milliseconds. If this happened between
two batches, the device would wait. `llama_decode` releases the GIL, so the I/O thread can use it during the decode.

`llama_decode` stays on the engine thread, which has the GIL when it passes a report to the publishing thread. A decode
on the second thread would have to wait for the GIL. Moreover, two threads would use the llama_context, which is not
thread-safe.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.worker.engine_loop.output_mailbox import Message
from llamaq.worker.engine_loop.shared_state import SharedState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Report:
    """What is published together: the measurements of at most one tick, then messages."""

    stats: TickStats | None = None
    messages: list[Message] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stats or self.messages)


class Publisher:
    """Passes measurements and messages to the telemetry and the mailbox, in the order in which they were added.

    The thread runs within a `with` block. At the end of the block, everything is published.

    Threads: the engine thread calls all methods. The publishing thread only gets reports, which no thread changes any
    more. It uses neither the scheduler nor the engine.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._next = _Report()
        self._reports: queue.SimpleQueue[_Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="publisher")
        self._error: Exception | None = None

    def add_tick(self, stats: TickStats) -> None:
        """Add the measurements of a tick. A hook gets them before the messages of the tick."""
        self._next.stats = stats

    def add(self, messages: Iterable[Message]) -> None:
        """Add messages to the next report."""
        self._next.messages += messages

    def publish(self) -> None:
        """Publish what was added. The thread begins as soon as the engine thread releases the GIL.

        Raises:
            Exception: An earlier report could not be published.
        """
        if self._error is not None:
            raise self._error
        if self._next:
            self._reports.put(self._next)  # neither blocks nor releases the GIL
            self._next = _Report()

    def _run(self) -> None:
        try:
            while (report := self._reports.get()) is not None:
                if report.stats is not None:
                    self._shared.telemetry.record_tick(report.stats)
                self._shared.outputs.put(report.messages)
        except Exception as exc:
            log.exception("publisher.failed")
            self._error = exc

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reports.put(self._next)
        self._reports.put(None)
        self._thread.join()
        if exc is None and self._error is not None:
            raise self._error
