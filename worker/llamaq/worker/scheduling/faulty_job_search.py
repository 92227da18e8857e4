"""Finds the job that is the cause when all logits of a token are NaN.

Attention reads the cells of all sequences, and gives those of other sequences the weight 0. But 0 times NaN is NaN. So
the cells of one job, for example with a strong LoRA adapter, can spoil the logits of all jobs. They can do so also
after this job has ended, because removed cells keep their data until other tokens are written to them.

Therefore a job whose logits are NaN does not fail at once. All cells are cleared with their data, and the running jobs
are suspected. One after another, each of them computes its tokens again, until its logits are numbers. If they are NaN
again, this job is the cause, and fails: no other job has written cells since they were cleared. That is also why no
job is admitted during a search, and why all cells are cleared once more if a suspect leaves before its logits are
known. The cells of a suspect are not cached.
"""

from __future__ import annotations

import logging

from llamaq.worker.core.batch import SlotResult
from llamaq.worker.core.finish_rules import are_all_nan
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
        self._computing: Run | None = None
        """The suspect that computes its tokens again."""
        self._has_nan = False
        """Whether logits of this tick are NaN."""

    def is_searching(self) -> bool:
        """Return whether a job is suspected, so that no other job may get cells. Call it before each plan."""
        if self._computing is not None and self._computing.is_released:  # it was cancelled, for example
            self._computing = None
            self._memory.clear()
        self._suspects = [run for run in self._suspects if not run.is_released]
        return bool(self._suspects)

    def slots_of_turn(self) -> tuple[Slot, ...]:
        """Return the slots that the next tick may compute: all slots, or that of the first suspect."""
        if not self.is_searching():
            return self._memory.slots
        self._computing = self._suspects[0]
        return tuple(slot for slot in self._memory.slots if slot.run is self._computing)

    def judge(self, result: SlotResult) -> SlotResult:
        """Return the result of a slot, without its error if the cells of another job may be the cause."""
        is_nan = are_all_nan(result.error)
        self._has_nan |= is_nan
        if self._computing is None or self._computing is not result.slot.run:
            return result._replace(error=None) if is_nan else result
        if result.sampled or result.error is not None:
            self._suspects.remove(self._computing)
            self._computing.is_suspected = is_nan
            self._computing = None
        return result

    def end_tick(self) -> bool:
        """Clear all cells if logits of this tick are NaN. Called after all results of the tick were applied.

        Returns:
            Whether the cells were cleared.
        """
        if not self._has_nan:
            return False
        self._has_nan = False
        if not self._suspects:
            self._suspects = [slot.active for slot in self._memory.active_slots]
            for run in self._suspects:
                run.is_suspected = True
        n_suspects = len(self._suspects)
        log.error("cache.cleared n_suspects=%d: logits were NaN, and the cells may spoil other jobs", n_suspects)
        self._memory.clear()
        return True

    def __repr__(self) -> str:
        return f"<FaultyJobSearch {len(self._suspects)} suspects>"
