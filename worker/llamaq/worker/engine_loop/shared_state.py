"""The objects that the threads of a worker share. They are created before the threads start."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamaq.worker.engine_loop.output_mailbox import OutputMailbox
from llamaq.worker.engine_loop.telemetry import Telemetry


@dataclass(slots=True)
class QueueDepthGauge:
    """The number of jobs of the queue without a slot. The heartbeat writes it; the engine thread reads it."""

    n_waiting: int = 0


@dataclass(frozen=True, slots=True)
class SharedState:
    """The objects that the engine thread, the publishing thread and the I/O thread share, except the commands to the
    tick loop.
    """

    telemetry: Telemetry = field(default_factory=Telemetry)
    """Measurements of ticks, from the publishing thread, and of jobs, from the I/O thread."""
    outputs: OutputMailbox = field(default_factory=OutputMailbox)
    """Outputs of jobs, from the publishing thread to the outbox."""
    queue_depth: QueueDepthGauge = field(default_factory=QueueDepthGauge)
    """The depth of the queue, from the heartbeat to the batch strategy."""
