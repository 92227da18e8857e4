"""Finds the job that is the cause when logits are not numbers.

Attention reads the cells of all sequences, and gives those of other sequences the weight 0. But 0 times NaN is NaN. So
the cells of one job, for example with a strong LoRA adapter, can spoil the logits of all jobs. They can do so also
after this job has ended, because removed cells keep their data until other tokens are written to them.

Therefore a job whose logits are not numbers does not fail at once. All cells are cleared with their data, and each
running job computes its tokens again while the others wait, until its logits are numbers. If they are not numbers
again, this job is the cause, and fails.
"""

from __future__ import annotations

import logging

from llamaq.worker.core.batch import SlotResult
from llamaq.worker.core.finish_rules import are_not_numbers
from llamaq.worker.core.slot import Run, Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory

log = logging.getLogger(__name__)


class FaultyJobSearch:
    """Remembers which running jobs may be the cause.

    Args:
        memory: The slots and the KV memory.
    """

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._suspects: list[Run] = []
        """The runs that may be the cause. The first one computes alone."""
        self._are_cells_spoiled = False

    def slots_of_turn(self) -> tuple[Slot, ...]:
        """Return the slots that the next tick may compute: all slots, or that of the first suspect."""
        while self._suspects and self._suspects[0].is_released:
            del self._suspects[0]
        if not self._suspects:
            return self._memory.slots
        return tuple(slot for slot in self._memory.slots if slot.run is self._suspects[0])

    def judge(self, result: SlotResult) -> SlotResult:
        """Return the result of a slot, without its error if the cells of another job may be the cause."""
        if result.error is None and not self._suspects:
            return result  # the usual case
        is_suspect = bool(self._suspects) and result.slot.run is self._suspects[0]
        if are_not_numbers(result.error):
            self._are_cells_spoiled = True
            return result if is_suspect else result._replace(error=None)
        if is_suspect and result.sampled:
            del self._suspects[0]
        return result

    def end_tick(self) -> bool:
        """Clear all cells if logits of this tick were not numbers. Called after all results of the tick were applied.

        Returns:
            Whether the cells were cleared.
        """
        if not self._are_cells_spoiled:
            return False
        self._are_cells_spoiled = False
        runs = [slot.active for slot in self._memory.active_slots]
        if not self._suspects:
            self._suspects = runs
        log.error("cache.cleared n_jobs=%d: logits were not numbers, and the cells may spoil other jobs", len(runs))
        self._memory.clear()
        return True

    def __repr__(self) -> str:
        return f"<FaultyJobSearch {len(self._suspects)} suspects>"
