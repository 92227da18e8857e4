"""The rules that the batch of a strategy must obey."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.draft import NO_DRAFT
from llamaq.worker.core.draft_plan import NO_DRAFT_PLAN
from llamaq.worker.core.slot import COMPUTING, Slot, SlotState


class PlanFault(StrEnum):
    """The rule that a strategy's batch breaks."""

    RAISED = "the strategy raised an exception"
    CHANGED_SLOTS = "the strategy changed a slot, which it may only read"
    NOT_A_BATCH = "the result is not a Batch of DecodeToken and PrefillChunk"
    UNKNOWN_SLOT = "a slot in the batch is not one of this worker's"
    IDLE_SLOT = "a slot in the batch is idle"
    WAITING_SLOT = "a slot in the batch waits for cells that another job computes or that are being loaded"
    SLOT_TWICE = "a slot is in the batch twice"
    DECODE_IN_PREFILL = "the batch has a decode token for a slot in PREFILL"
    CHUNK_IN_DECODE = "the batch has a prefill chunk for a slot in DECODE"
    BAD_CHUNK = "a chunk is empty or longer than the slot's pending tokens"
    DRAFT = "the batch has a draft, which only the worker itself adds"
    OVER_BUDGET = "the batch has more tokens than the budget"
    NOTHING = "the batch is empty while slots are in PREFILL or DECODE"


def check_plan(batch: Batch, slots: Sequence[Slot], budget: int) -> PlanFault | None:
    """Return the rule that the batch breaks, or None."""
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
    if batch.draft_plan is not NO_DRAFT_PLAN:
        return PlanFault.DRAFT
    if batch.n_tokens > budget:
        return PlanFault.OVER_BUDGET
    if not batch and any(slot.state in COMPUTING for slot in slots):
        return PlanFault.NOTHING
    return None


def _is_batch(batch: object) -> bool:
    if not isinstance(batch, Batch):
        return False
    decode: Any = batch.decode  # typed Any, because a faulty strategy may set any object here
    prefill: Any = batch.prefill
    return (
        isinstance(decode, tuple)
        and isinstance(prefill, tuple)
        and all(isinstance(part, DecodeToken) for part in decode)
        and all(isinstance(chunk, PrefillChunk) and type(chunk.n_tokens) is int for chunk in prefill)
    )


def _check_part(part: DecodeToken | PrefillChunk, known: frozenset[Slot]) -> PlanFault | None:
    slot: Any = part.slot  # typed Any, because a faulty strategy may set any object here
    if not isinstance(slot, Slot) or slot not in known:
        return PlanFault.UNKNOWN_SLOT
    if slot.state is SlotState.IDLE:
        return PlanFault.IDLE_SLOT
    if slot.state not in COMPUTING:
        return PlanFault.WAITING_SLOT
    if isinstance(part, DecodeToken):
        if slot.state is SlotState.PREFILL:
            return PlanFault.DECODE_IN_PREFILL
        return None if part.draft is NO_DRAFT and not part.forced else PlanFault.DRAFT
    if slot.state is SlotState.DECODE:
        return PlanFault.CHUNK_IN_DECODE
    return None if 1 <= part.n_tokens <= slot.n_pending else PlanFault.BAD_CHUNK
