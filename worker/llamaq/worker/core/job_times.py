"""When a job waits, computes and must end."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class JobTimes:
    """The times of a job. Points in time are seconds on the clock of the worker, `time.monotonic`."""

    submitted_s: float | None = None
    """When the client submitted the job. None: not known."""
    deadline_s: float | None = None
    """When the job must end. None: it has no deadline."""
    queue_ms: float | None = None
    """Milliseconds from submit to the first slot of the job. None: it had no slot so far, in any attempt."""
    slot_s: float = 0.0
    """Seconds that the job has had a slot, over all attempts."""
    first_slot_s: float | None = None
    """When this attempt had its first slot. None: not yet."""
    preempted_s: float = 0.0
    """Seconds that this attempt waited for another slot after preemptions. A wait that has not ended does not count."""
    slot_lost_s: float | None = None
    """When this attempt lost its slot. None: it has a slot, or had none so far."""

    def gain_slot(self, now_s: float) -> None:
        """Record that the job has a slot now. May be called again after a preemption."""
        if self.queue_ms is None:
            self.queue_ms = self.waited_ms(now_s)
        if self.first_slot_s is None:
            self.first_slot_s = now_s
        self.preempted_s, self.slot_lost_s = self._preempted_until(now_s), None

    def lose_slot(self, now_s: float) -> None:
        """Record that the job was preempted."""
        self.slot_lost_s = now_s

    def preempted_ms(self, now_s: float) -> float | None:
        """Return the milliseconds that this attempt waited for another slot. None: it was not preempted."""
        return self._preempted_until(now_s) * 1000 or None

    def _preempted_until(self, now_s: float) -> float:
        return self.preempted_s + (0.0 if self.slot_lost_s is None else now_s - self.slot_lost_s)

    def waited_ms(self, now_s: float) -> float:
        """Return the milliseconds from submit to the first slot, or to `now_s` if the job had no slot so far."""
        if self.queue_ms is not None:
            return self.queue_ms
        return 0.0 if self.submitted_s is None else (now_s - self.submitted_s) * 1000

    def ends_s(self, now_s: float, timeout_s: float | None) -> float:
        """Return when `has_expired` becomes true if the job keeps its slot. Infinite if the job may take any time."""
        deadline_s = inf if self.deadline_s is None else self.deadline_s
        return deadline_s if timeout_s is None else min(deadline_s, now_s + timeout_s - self.slot_s)

    def has_expired(self, now_s: float, timeout_s: float | None) -> bool:
        """Return whether the job has reached its deadline, or had a slot for `timeout_s`."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            return True
        return timeout_s is not None and self.slot_s >= timeout_s
