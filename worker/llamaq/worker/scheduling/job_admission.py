"""Chooses the waiting jobs that get a slot, and preempts running jobs for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llamaq.worker.core.job import Job
from llamaq.worker.kv_cache.eviction import Room
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_lookup import Candidate
from llamaq.worker.scheduling.bulk_share import BulkShare, count_bulk
from llamaq.worker.scheduling.preemption import Preemption
from llamaq.worker.scheduling.waiting_queue import WaitingQueue


class JobAdmission:
    """Admits waiting jobs in the order of the queue, as far as there are slots, sequences and cells for them.

    Args:
        memory: The slots and the KV memory.
        waiting: The jobs without a slot.
        bulk_share: The share of the slot time that bulk jobs get.
        preemption: Preempts running jobs for interactive jobs.
        give_slot: Gives a slot to a candidate for which there is room.
    """

    def __init__(
        self,
        memory: KvMemory,
        waiting: WaitingQueue,
        bulk_share: BulkShare,
        preemption: Preemption,
        give_slot: Callable[[Candidate], None],
    ) -> None:
        self._memory = memory
        self._waiting = waiting
        self._bulk_share = bulk_share
        self._preemption = preemption
        self._give_slot = give_slot

    def admit_waiting(self) -> None:
        """Admit waiting jobs while there is room, or while room can be made for one of them."""
        while self._waiting and self._admit_next():
            pass

    def _admit_next(self) -> bool:
        """Admit the next job, or preempt a running job for it. Returns False when neither is possible now."""
        passed: list[Job] = []  # the jobs that were tried before, and for which there was no room
        for candidate in self._candidates():
            room = self._memory.make_room(candidate)
            if room is Room.AVAILABLE:
                self._waiting.pop(candidate.job, passed)
                self._give_slot(candidate)
                return True
            if room is Room.PENDING:
                return False
            if self._preemption.preempt_for([candidate.job]):
                return True
            passed.append(candidate.job)
        if passed:
            return False
        return self._preemption.preempt_for(self._waiting.urgent())  # no waiting job has an idle slot

    def _candidates(self) -> Iterable[Candidate]:
        """Return the waiting jobs that have an idle slot, with their reusable prefixes, in the order of trial."""
        active = self._memory.active_slots
        if len(active) == len(self._memory.slots):
            return ()
        return self._waiting.candidates(
            self._memory.has_slot,
            self._memory.find_prefix,
            running=[slot.active.job for slot in active],
            bulk_first=self._bulk_share.is_due(count_bulk(active)),
        )
