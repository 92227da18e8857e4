"""Preempts running jobs, to admit a waiting job of higher priority or to free cells that running jobs need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.bulk_share import BulkShare
from llamaq.worker.scheduling.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)

PROTECTED_TOKENS = 32
"""Number of tokens that a bulk job generates before it can be preempted for an interactive job a second time."""
CELLS_AHEAD = 8
"""A job is preempted for cells when the running jobs cannot generate this many tokens each. This leaves time to save
the cells of the preempted job before the other jobs need them."""


class Preemption:
    """Moves running jobs back to the waiting queue. A preempted job resumes later, usually with its cached cells.

    Two rules keep jobs from losing their slots again and again:

    - A bulk job that was preempted for an interactive job generates `PROTECTED_TOKENS` tokens in its next run before it
      can be preempted again. This rule protects at most as many slots as the bulk share has, at least one slot, and
      never all slots. So an interactive job waits only while bulk jobs are owed their share, or while other interactive
      jobs run.
    - Each time a job is preempted because cells ran out, the margin of its next admission doubles.
    """

    def __init__(
        self, memory: KvMemory, waiting: WaitingQueue, bulk_share: BulkShare, on_preempted: Callable[[Slot], None]
    ) -> None:
        """Create the object.

        Args:
            memory: The slots and the KV memory.
            waiting: The queue to which preempted jobs return.
            bulk_share: The share of the slot time that bulk jobs get.
            on_preempted: Called with the slot of each preempted job, before the job loses it.
        """
        self._memory = memory
        self._waiting = waiting
        self._bulk_share = bulk_share
        self._on_preempted = on_preempted
        self.n_preempted = 0

    @property
    def may_preempt(self) -> bool:
        """Whether an interactive job waits while a bulk job runs, so that a job may be preempted at any time."""
        return any(self._waiting.interactive) and any(
            slot.priority is Priority.BULK for slot in self._memory.active_slots
        )

    def preempt_for(self, jobs: Iterable[Job]) -> bool:
        """Preempt one bulk job for the first of these jobs for which this can make room.

        Bulk jobs among `jobs` are skipped. The bulk job that was admitted last is preempted. If the interactive job
        requests a certain slot, and a bulk job runs in this slot, that bulk job is preempted instead.

        Returns:
            False when even the preemption of all bulk jobs would not make enough room for one of the jobs. Then no job
            is preempted.
        """
        preemptible = self._preemptible()
        if not preemptible:
            return False
        job = next((job for job in jobs if self._could_admit(job, preemptible)), None)
        if job is None:
            return False
        has_slot = self._memory.has_slot(job)
        pinned = [slot for slot in preemptible if slot.index == job.request.slot and not has_slot]
        slot = max(pinned or preemptible, key=lambda slot: slot.active.admission_number)
        slot.active.job.protected_tokens = slot.active.n_generated + PROTECTED_TOKENS
        self._preempt(slot)
        return True

    def _could_admit(self, job: Job, without: list[Slot]) -> bool:
        return job.request.priority is Priority.INTERACTIVE and self._memory.could_admit(job, without=without)

    def _preemptible(self) -> list[Slot]:
        """Return the slots whose bulk jobs may be preempted for an interactive job."""
        bulk = [slot for slot in self._memory.active_slots if slot.priority is Priority.BULK]
        bulk.sort(key=lambda slot: slot.active.admission_number)
        kept = self._kept(bulk)
        return [slot for slot in bulk if slot not in kept]

    def _kept(self, bulk: list[Slot]) -> list[Slot]:
        """Return the slots that bulk jobs keep.

        While bulk jobs are owed slot time, the jobs admitted first keep the slots of the bulk share. Otherwise, only
        protected jobs keep their slots. These are at most as many slots as the bulk share has, at least one slot, and
        never all slots.

        Args:
            bulk: The slots with a bulk job, in the order of admission.
        """
        n_share = self._bulk_share.n_slots
        if self._bulk_share.is_owed:
            return bulk[:n_share]
        protected = [slot for slot in bulk if not slot.active.is_preemptible]
        return protected[: min(max(1, n_share), len(self._memory.slots) - 1)]

    def keep_room(self) -> None:
        """Free cells at once if the running jobs cannot compute their next `CELLS_AHEAD` tokens."""
        if not self._memory.lacks_cells(CELLS_AHEAD):
            return  # the usual case, with one sum over the slots
        while self._memory.lacks_cells() and self.free_cells():
            pass
        if self._memory.lacks_cells(CELLS_AHEAD) and not self._memory.has_entries:
            self._preempt_youngest()

    def free_cells(self) -> bool:
        """Free cells at once: drop the least recently used cached sequence. If no sequence is cached, preempt a job.

        Returns:
            False when there is no cached sequence and at most one running job.
        """
        return self._memory.drop_coldest() or self._preempt_youngest()

    def _preempt_youngest(self) -> bool:
        """Preempt the bulk job that was admitted last. If no bulk job runs, preempt the interactive job admitted last.

        The interactive job that was admitted first is never preempted, so it always finishes.

        Returns:
            False when at most one job runs.
        """
        active = self._memory.active_slots
        if len(active) < 2:
            return False
        slot = max(active, key=lambda slot: (slot.priority is Priority.BULK, slot.active.admission_number))
        slot.active.job.n_out_of_cells += 1
        self._preempt(slot)
        return True

    def _preempt(self, slot: Slot) -> None:
        run = slot.active
        job = run.job
        log.info("job.preempted id=%s slot=%d generated_tokens=%d", job.id, slot.index, run.n_generated)
        self._on_preempted(slot)
        job.generated_before = run.tokens[run.n_prompt :]
        job.packed = run.packed_history(len(run.tokens))
        self._memory.release(slot, reusable=True)
        self._waiting.put_first(job)
        self.n_preempted += 1

    def __repr__(self) -> str:
        return f"<Preemption {self.n_preempted} preempted>"
