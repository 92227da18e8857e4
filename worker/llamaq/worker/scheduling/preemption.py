"""Preempts running jobs, to admit a waiting job of higher priority or to free cells that a tick needs at once."""

from __future__ import annotations

import logging

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)


class Preemption:
    """Moves running jobs back to the waiting queue. A preempted job resumes later, usually with its cached cells."""

    def __init__(self, memory: KvMemory, waiting: WaitingQueue) -> None:
        self._memory = memory
        self._waiting = waiting
        self.n_preempted = 0

    def preempt_for(self, job: Job) -> bool:
        """Preempt one bulk job for an interactive job: the bulk job that was admitted last.

        If the interactive job requests a certain slot, and a bulk job runs in this slot, that bulk job is preempted
        instead.

        Returns:
            False when `job` is not interactive, or when even the preemption of all bulk jobs would not make enough
            room. Then no job is preempted.
        """
        if job.request.priority is not Priority.INTERACTIVE:
            return False
        active = self._memory.active_slots
        preemptible = [slot for slot in active if slot.priority is Priority.BULK and slot.active.is_preemptible]
        if not preemptible or not self._memory.could_admit(job, without=preemptible):
            return False
        has_slot = self._memory.has_slot(job)
        pinned = [slot for slot in preemptible if slot.index == job.request.slot and not has_slot]
        self._preempt(max(pinned or preemptible, key=lambda slot: slot.active.admission_number))
        return True

    def free_cells(self) -> bool:
        """Free cells at once: drop the least recently used cached sequence.

        If no sequence is cached, preempt the running bulk job that was admitted last. If no bulk job runs, preempt the
        interactive job that was admitted last.

        Returns:
            False when there is no cached sequence and at most one running job.
        """
        if self._memory.drop_coldest():
            return True
        active = self._memory.active_slots
        if len(active) < 2:
            return False
        self._preempt(max(active, key=lambda slot: (slot.priority is Priority.BULK, slot.active.admission_number)))
        return True

    def _preempt(self, slot: Slot) -> None:
        run = slot.active
        job = run.job
        log.info("job.preempted id=%s slot=%d generated_tokens=%d", job.id, slot.index, run.n_generated)
        job.resumed = run.tokens[run.n_prompt :]
        job.packed = run.packed_history(len(run.tokens))
        self._memory.release(slot, reusable=True)
        self._waiting.requeue(job)
        self.n_preempted += 1

    def __repr__(self) -> str:
        return f"<Preemption {self.n_preempted} preempted>"
