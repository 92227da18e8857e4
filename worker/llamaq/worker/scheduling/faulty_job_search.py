"""Finds the job that is the cause when all logits of a token are NaN.

Attention reads the cells of all sequences, and gives those of other sequences the weight 0. But 0 times NaN is NaN. So
the cells of one job, for example with a strong LoRA adapter, can spoil the logits of all jobs. They can do so also
after this job has ended, because removed cells keep their data until other tokens are written to them.

Therefore a job whose logits are NaN does not fail at once. All cells are cleared with their data, and the running jobs
are suspected. One after another, each of them computes its tokens again, until its next logits are known. If they are
NaN again, this job is the cause, and fails: since the cells were cleared, only jobs whose logits are numbers have
written others. That is also why no job is admitted during a search, and why all cells are cleared once more if a
suspect leaves before its logits are known. The cells of a suspect are not cached.
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
        self._must_begin = False
        """Whether logits of this tick are NaN, without a search."""
        self._must_clear = False
        """Whether a suspect has failed in this tick."""

    @property
    def is_searching(self) -> bool:
        """Whether a job is suspected, so that no other job may get cells."""
        return bool(self._suspects)

    def forget_released(self) -> None:
        """Suspect no job that has left its slot. Call this before jobs are admitted."""
        if self._computing is not None and self._computing.is_released:  # it was cancelled, for example
            self._computing = None
            self._memory.clear()
        self._suspects = [run for run in self._suspects if not run.is_released]

    def slots_of_turn(self) -> tuple[Slot, ...]:
        """Return the slots that the next tick may compute: all slots, or that of the first suspect."""
        if not self._suspects:
            return self._memory.slots
        self._computing = self._suspects[0]
        return tuple(slot for slot in self._memory.slots if slot.run is self._computing)

    def judge(self, result: SlotResult) -> SlotResult:
        """Return the result of a slot, without its error if the cells of another job may be the cause."""
        if self._computing is None or self._computing is not result.slot.run:
            if not are_all_nan(result.error):
                return result
            self._must_begin = True
            return result._replace(error=None)
        if result.sampled or result.error is not None:
            self._suspects.remove(self._computing)
            self._must_clear = self._computing.is_suspected = result.error is not None
            self._computing = None
        return result

    def end_tick(self) -> bool:
        """Begin a search, or clear the cells of a suspect that has failed. Called after all results were applied.

        Returns:
            Whether the cells were cleared.
        """
        if self._must_begin:
            self._suspects = [slot.active for slot in self._memory.active_slots]
            for run in self._suspects:
                run.is_suspected = True
            n_suspects = len(self._suspects)
            log.error("cache.cleared n_suspects=%d: logits were NaN, and the cells may spoil other jobs", n_suspects)
        elif not self._must_clear:
            return False
        self._must_begin = self._must_clear = False
        self._memory.clear()
        return True

    def __repr__(self) -> str:
        return f"<FaultyJobSearch {len(self._suspects)} suspects>"
