"""Asks a strategy for a batch and checks the answer, so that no strategy can harm the worker by accident."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import COMPUTING, Run, Slot, SlotState
from llamaq.worker.scheduling.batch_strategy import BatchStrategy, DecodeMaximal

log = logging.getLogger(__name__)


class PlanFault(StrEnum):
    """What is wrong with a batch that a strategy gave."""

    RAISED = "the strategy raised an exception"
    CHANGED_SLOTS = "the strategy changed slots instead of looking at them"
    NOT_A_BATCH = "it is not a Batch of DecodeToken and PrefillChunk"
    UNKNOWN_SLOT = "a slot in it is not one of this worker's"
    IDLE_SLOT = "a slot in it is idle"
    WAITING_SLOT = "a slot in it waits for cells that are computed or loaded elsewhere"
    SLOT_TWICE = "a slot stands in it twice"
    DECODE_IN_PREFILL = "it has a decode token for a slot in PREFILL"
    CHUNK_IN_DECODE = "it has a prefill chunk for a slot in DECODE"
    BAD_CHUNK = "a chunk is empty or longer than what is pending"
    OVER_BUDGET = "it has more tokens than the budget"
    NOTHING = "it is empty while slots have work"


def check_plan(batch: Batch, slots: Sequence[Slot], budget: int) -> PlanFault | None:
    """What is wrong with the batch as a plan for these slots, or None."""
    if not _is_batch(batch):
        return PlanFault.NOT_A_BATCH
    used: set[Slot] = set()
    known = frozenset(slots)
    for part in batch.parts:
        if fault := _check_part(part, known):
            return fault
        if part.slot in used:
            return PlanFault.SLOT_TWICE
        used.add(part.slot)
    if batch.n_tokens > budget:
        return PlanFault.OVER_BUDGET
    if not batch and any(slot.state in COMPUTING for slot in slots):
        return PlanFault.NOTHING
    return None


def _is_batch(batch: object) -> bool:
    if not isinstance(batch, Batch):
        return False
    decode: Any = batch.decode  # whatever somebody put there
    prefill: Any = batch.prefill
    return (
        isinstance(decode, tuple)
        and isinstance(prefill, tuple)
        and all(isinstance(part, DecodeToken) for part in decode)
        and all(isinstance(chunk, PrefillChunk) and type(chunk.n_tokens) is int for chunk in prefill)
    )


def _check_part(part: DecodeToken | PrefillChunk, known: frozenset[Slot]) -> PlanFault | None:
    slot: Any = part.slot  # whatever somebody put there
    if not isinstance(slot, Slot) or slot not in known:
        return PlanFault.UNKNOWN_SLOT
    if slot.state is SlotState.IDLE:
        return PlanFault.IDLE_SLOT
    if slot.state not in COMPUTING:
        return PlanFault.WAITING_SLOT
    if isinstance(part, DecodeToken):
        return PlanFault.DECODE_IN_PREFILL if slot.state is SlotState.PREFILL else None
    if slot.state is SlotState.DECODE:
        return PlanFault.CHUNK_IN_DECODE
    return None if 1 <= part.n_tokens <= slot.n_pending else PlanFault.BAD_CHUNK


class Planner:
    """A strategy under supervision: nonsense is reported, and `DecodeMaximal` plans that tick instead."""

    def __init__(self, strategy: BatchStrategy, budget: int, chunk_size: int) -> None:
        self.strategy = strategy
        self.budget = budget
        self.chunk_size = chunk_size
        self.faults: Counter[PlanFault] = Counter()
        """How often each kind of nonsense was met; the log has the first of each."""
        self._fallback = DecodeMaximal()

    def plan(self, slots: tuple[Slot, ...], queue_depth: int) -> Batch:
        """A batch that keeps the rules, whatever the strategy does."""
        return _stop_where_told(self._checked_plan(slots, queue_depth))

    def _checked_plan(self, slots: tuple[Slot, ...], queue_depth: int) -> Batch:
        before = [_State(slot) for slot in slots]
        batch = Batch()
        fault: PlanFault | None = None
        cause: Exception | None = None
        try:
            batch = self.strategy.build_batch(slots, self.budget, self.chunk_size, queue_depth=queue_depth)
        except Exception as exc:  # noqa: BLE001 - a user's strategy may raise anything
            fault, cause = PlanFault.RAISED, exc
        if sum(state.restore() for state in before):  # all of them: any() would stop at the first
            fault = fault or PlanFault.CHANGED_SLOTS
        fault = fault or check_plan(batch, slots, self.budget)
        if fault is None:
            return batch
        self._report(fault, cause)
        return self._fallback.build_batch(slots, self.budget, self.chunk_size, queue_depth=queue_depth)

    def _report(self, fault: PlanFault, cause: Exception | None) -> None:
        self.faults[fault] += 1
        if self.faults[fault] == 1:
            log.error("strategy.refused fault=%s strategy=%r: %s", fault.name, self.strategy, fault, exc_info=cause)


def _stop_where_told(batch: Batch) -> Batch:
    """The batch with chunks that end where the state in between is wanted."""
    if not any(chunk.slot.active.checkpoints for chunk in batch.prefill):
        return batch
    return Batch(batch.decode, tuple(PrefillChunk(chunk.slot, _up_to_stop(chunk)) for chunk in batch.prefill))


def _up_to_stop(chunk: PrefillChunk) -> int:
    run = chunk.slot.active
    ways = (stop - run.n_past for stop in run.checkpoints if stop > run.n_past)
    return min(chunk.n_tokens, next(ways, chunk.n_tokens))


class _State:
    """What a slot was before a strategy saw it."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._state = slot.state
        self._run = slot.run
        self._n_past = slot.run.n_past if slot.run else 0
        self._n_tokens = len(slot.run.tokens) if slot.run else 0

    def restore(self) -> bool:
        """Put it back; says whether anything had changed."""
        slot, run = self._slot, self._run
        changed = slot.state is not self._state or slot.run is not run
        slot.state, slot.run = self._state, run
        return _restore_run(run, self._n_past, self._n_tokens) or changed if run else changed


def _restore_run(run: Run, n_past: int, n_tokens: int) -> bool:
    changed = run.n_past != n_past or len(run.tokens) != n_tokens
    run.n_past = n_past
    del run.tokens[n_tokens:]
    return changed
