"""Running jobs that give their slots up: for a job of higher priority, or for cells that are needed at once."""

from __future__ import annotations

import logging

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)


class Preemption:
    """Sends running jobs back to the line. They go on later from what they had, mostly out of the prefix cache."""

    def __init__(self, memory: KvMemory, waiting: WaitingQueue) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._waiting = waiting
        self.n_preempted = 0

    def make_way_for(self, job: Job) -> bool:
        """Take the slot from the youngest job of a lower priority, if that and more of its kind make enough room."""
        if job.request.priority is not Priority.INTERACTIVE:
            return False
        lower = [slot for slot in self._pool.active if slot.priority is Priority.BULK and slot.active.is_preemptible]
        if not lower or not self._pool.could_acquire(job, without=lower):
            return False
        pinned = [slot for slot in lower if slot.index == job.request.slot and not self._pool.has_slot(job)]
        self._preempt(max(pinned or lower, key=lambda slot: slot.active.admission_number))
        return True

    def free_cells(self) -> bool:
        """Free cells at once: a kept sequence's, else those of the youngest job of the lowest priority.

        False when there is only one job.
        """
        if self._memory.eviction.drop_coldest():
            return True
        if len(self._pool.active) < 2:
            return False
        self._preempt(max(self._pool.active, key=lambda slot: (slot.priority is Priority.BULK, slot.active.admission_number)))
        return True

    def _preempt(self, slot: Slot) -> None:
        run = slot.active
        job = run.job
        log.info("job.preempted id=%s slot=%d generated_tokens=%d", job.id, slot.index, run.n_generated)
        job.resumed = run.tokens[run.n_prompt :]
        job.packed = run.packed_history(len(run.tokens))
        self._memory.leave(slot, reusable=True)
        self._waiting.put_back(job)
        self.n_preempted += 1

    def __repr__(self) -> str:
        return f"<Preemption {self.n_preempted} preempted>"
