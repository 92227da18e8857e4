"""Publishes what the ticks have produced, on its own thread, while the engine thread computes the next batch.

The thread also makes the outputs of repeated ticks, see `LateOutputs`.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.worker.core.batch import TickBatch
from llamaq.worker.core.outputs import NewToken
from llamaq.worker.engine_loop.output_mailbox import Message
from llamaq.worker.engine_loop.shared_state import SharedState

log = logging.getLogger(__name__)


class TickRecord(NamedTuple):
    """What the engine thread knows about a tick that has ended."""

    batch: TickBatch
    """The batch. Only its numbers are read, because its slots change."""
    eval_s: float
    """Seconds that the engine took."""
    n_accepted: int
    """Number of draft tokens that became tokens of an output."""
    queue_depth: int
    """Number of jobs of the queue without a slot."""

    def stats(self) -> TickStats:
        """Return the measurements of the tick."""
        batch = self.batch
        return TickStats.model_construct(  # without validation, which would cost time in every tick
            batch_size=batch.n_tokens,
            decode_tokens=batch.n_decode + batch.n_forced + self.n_accepted,
            prefill_tokens=batch.n_prefill,
            active_slots=batch.n_jobs,
            queue_depth=self.queue_depth,
            eval_ms=self.eval_s * 1000,
            drafts=batch.n_drafts,
            drafted_tokens=batch.n_drafted,
            accepted_tokens=self.n_accepted,
        )


@dataclass(slots=True)
class _Report:
    """Measurements of ticks, and messages, which are published together: the measurements first."""

    ticks: list[TickRecord] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ticks or self.messages)


class Publisher:
    """Passes measurements and messages to the telemetry and the mailbox, in the order in which they were added.

    The thread runs within a `with` block. At the end of the block, everything is published.

    Threads: the engine thread calls all methods. No thread changes a report after it was passed to the publishing
    thread. The publishing thread also runs the work that `post` and `start` pass to it. The work of `start` may call
    `add_tick`, `add` and `publish_here`, so the engine thread calls no other method from `start` to `join`.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._next = _Report()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """For each call of `start`, the exception of its work, or None."""
        self._publishing_thread = threading.Thread(target=self._run, name="publisher")
        self._error: BaseException | None = None

    def add_tick(self, batch: TickBatch, eval_s: float, n_accepted: int) -> None:
        """Add the measurements of a tick. A hook gets them before the messages of the tick.

        Args:
            batch: The batch of the tick.
            eval_s: Seconds that the engine took.
            n_accepted: Number of draft tokens that became tokens of an output.
        """
        self._next.ticks.append(TickRecord(batch, eval_s, n_accepted, self._shared.queue_depth.n_waiting))

    def add(self, messages: Iterable[Message]) -> None:
        """Add messages to the next report."""
        self._next.messages += messages

    @property
    def is_urgent(self) -> bool:
        """Whether one of the added messages must not wait: any message except the second and later tokens of a job."""
        return any(not isinstance(one, NewToken) or one.is_first for one in self._next.messages)

    def publish(self) -> None:
        """Publish the added measurements and messages. The thread begins as soon as the engine thread releases the GIL.

        Raises:
            BaseException: An earlier report could not be published.
        """
        if self._error is not None:
            raise self._error
        if self._next:
            self._work.put(partial(self._deliver, self._next))  # neither blocks nor releases the GIL
            self._next = _Report()

    def publish_here(self) -> None:
        """Publish the added measurements and messages on the calling thread. The work of `start` calls this method."""
        report, self._next = self._next, _Report()
        self._deliver(report)

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the publishing thread, after the reports that were published before. It must not raise."""
        self._work.put(work)

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` on the publishing thread, after the reports that were published before. Then call `join`."""
        self._work.put(partial(self._run_and_tell, work))

    def join(self) -> None:
        """Wait until the work of `start` has been done.

        Raises:
            BaseException: The work has raised it, or an earlier report could not be published.
        """
        if (error := self._done.get()) is not None:
            raise error

    def _run_and_tell(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - `join` raises it, also the panic of a library in Rust
            self._done.put(exc)
        else:
            self._done.put(None)

    def _deliver(self, report: _Report) -> None:
        for tick in report.ticks:
            self._shared.telemetry.record_tick(tick.stats())
        self._shared.outputs.put(report.messages)

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                work()
        except BaseException as exc:
            log.exception("publisher.failed")
            self._error = exc
            self._done.put(exc)  # the engine thread may wait for a result

    def __enter__(self) -> Self:
        self._publishing_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._work.put(partial(self._deliver, self._next))
        self._work.put(None)
        self._publishing_thread.join()
        if exc is None and self._error is not None:
            raise self._error
