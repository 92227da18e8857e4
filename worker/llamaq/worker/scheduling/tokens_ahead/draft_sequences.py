"""Records the tokens in the sequences of the draft model, and plans its work for the drafts of a tick."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from llamaq.worker.core.batch import Batch
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.draft_plan import DraftPart, DraftPlan
from llamaq.worker.core.packed_tokens import common_prefix
from llamaq.worker.core.slot import Run, Slot

NO_RUN = -1


@dataclass(slots=True)
class _Sequence:
    """The sequence of one slot."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    """The tokens that it holds."""
    n_equal: int = 0
    """Number of its first tokens that are known to be equal to the history of the run."""
    run: int = NO_RUN
    """Admission number of the run that `n_equal` belongs to."""
    slot: Slot | None = None
    """The slot, if `n_equal` was found for a run of it."""
    scope: Scope | None = None
    """The jobs that may use the tokens. None: no other job."""
    n_usable: int = 0
    """Number of first tokens that the run may use."""
    refused_run: int = NO_RUN
    """Admission number of a run whose history has a token that the draft model does not have."""
    used: int = 0
    """Number of the plan that used it last."""

    @property
    def is_used(self) -> bool:
        """Whether the run of `n_equal` is still in its slot."""
        run = None if self.slot is None else self.slot.run
        return run is not None and run.admission_number == self.run


class DraftSequences:
    """Decides what the draft model computes. Each slot has one sequence, which follows the history of its jobs.

    A sequence keeps its tokens when its job ends: the next job of the slot may begin with the same tokens. As in the
    prefix cache, a job uses the tokens of another job only if their scopes allow it.

    Args:
        n_slots: Number of slots.
        n_cells: Number of KV cells of the draft model.
        n_vocab: Number of tokens of the draft model's vocabulary.
        held_cells: Upper bound on the cells of slots that generate nothing. Attention scans every used cell, so idle
            cells slow each step.
    """

    def __init__(self, n_slots: int, n_cells: int, n_vocab: int, held_cells: int) -> None:
        self._sequences = [_Sequence() for _ in range(n_slots)]
        # After an improbable token, a sequence holds one token more than is known here.
        self._n_cells = n_cells - n_slots
        self._n_vocab = n_vocab
        self._held_cells = held_cells
        self._n_plans = 0
        self._n_reserved = 0
        """Number of cells that the slots of this plan will need for the rest of their histories and for drafts."""

    def n_missing(self, slot: Slot) -> int | None:
        """Return how many tokens of the slot's history must be computed before its next token can be drafted.

        None: the draft model cannot compute the history, because it has no such token.
        """
        sequence, run = self._sequences[slot.index], slot.active
        if sequence.refused_run == run.admission_number:
            return None
        self._compare(slot)
        return len(run.tokens) - self._n_kept(slot)

    def has_room(self, slot: Slot) -> bool:
        """Return whether the history of a slot, and a draft of one token, have cells if all others are emptied."""
        return len(slot.active.tokens) <= self._n_cells

    def fitting(self, missing: Mapping[Slot, int]) -> set[Slot]:
        """Return the slots for which `has_room` is true for all at once.

        Args:
            missing: Maps slots to `n_missing`. Slots with fewer missing tokens come first, as in `plan`.
        """
        n_free, found = self._n_cells, set()
        for slot in sorted(missing, key=missing.__getitem__):
            n_cells = len(slot.active.tokens)
            if n_cells <= n_free:
                n_free -= n_cells
                found.add(slot)
        return found

    def plan(self, wanted: Mapping[Slot, int], generating: Collection[Slot], max_missing: int) -> DraftPlan:
        """Return what the draft model computes before this tick.

        Slots with fewer missing tokens come first. A slot gets no part if there are no cells for its history.

        Args:
            wanted: Largest number of tokens to draft for each slot, at least 1.
            generating: The slots that generate tokens. The slots of `wanted` are among them.
            max_missing: Largest number of missing tokens of all slots together.
        """
        self._n_plans += 1
        self._n_reserved = 0
        emptied = self._release_idle(generating)
        missing = {slot: n_missing for slot in wanted if (n_missing := self.n_missing(slot)) is not None}
        parts = []
        for slot in sorted(missing, key=missing.__getitem__):
            n_now = min(missing[slot], max_missing)
            n_tokens = wanted[slot] if n_now == missing[slot] else 0
            part = DraftPart(slot, self._n_kept(slot), n_now, n_tokens)
            n_cells = len(slot.active.tokens) + wanted[slot] - 1  # of the whole history: a part is of no use
            if n_now > 0 and self._has_tokens(part) and self._make_room(slot, n_cells, wanted, emptied):
                max_missing -= n_now
                parts.append(part)
                self._add(part)
                self._n_reserved += n_cells - part.n_past
        return DraftPlan(tuple(parts), tuple(emptied))

    def record(self, batch: Batch) -> None:
        """Learn what the sequences hold after the draft model has executed the plan of the batch."""
        work = batch.draft_work
        if work.has_failed:
            self._sequences = [_Sequence() for _ in self._sequences]
            return
        drafts = {part.slot: part.draft for part in batch.decode}
        for part in batch.draft_plan.parts:
            if part.slot.index in work.lost:
                self._empty(part.slot.index)
            elif part.n_tokens:
                # The last token of a draft is not computed. After an improbable token it is, and the next plan cuts it.
                self._sequences[part.slot.index].tokens.extend(drafts[part.slot].tokens[:-1])

    @property
    def n_used(self) -> int:
        """Number of cells that the sequences hold."""
        return sum(len(sequence.tokens) for sequence in self._sequences)

    def _compare(self, slot: Slot) -> None:
        """Find out how many tokens of the sequence are equal to the history. The history of a run only grows."""
        sequence, run = self._sequences[slot.index], slot.active
        if sequence.run != run.admission_number:
            sequence.slot, sequence.run = slot, run.admission_number
            sequence.n_usable = _n_usable(sequence.scope, _scope_of(run))
            n_common = common_prefix(sequence.tokens.tobytes(), run.packed_history(len(run.tokens)))
            sequence.n_equal = min(n_common, sequence.n_usable)
            return
        end = min(len(sequence.tokens), len(run.tokens), sequence.n_usable)
        while sequence.n_equal < end and sequence.tokens[sequence.n_equal] == run.tokens[sequence.n_equal]:
            sequence.n_equal += 1

    def _n_kept(self, slot: Slot) -> int:
        """Return how many tokens the sequence keeps. The last token of the history is computed for its logits."""
        return min(self._sequences[slot.index].n_equal, len(slot.active.tokens) - 1)

    def _has_tokens(self, part: DraftPart) -> bool:
        """Return whether the draft model has all tokens of a part. If not, the run is refused from now on."""
        if max(part.slot.active.tokens[part.n_kept : part.n_past]) < self._n_vocab:
            return True
        self._sequences[part.slot.index].refused_run = part.slot.active.admission_number
        return False

    def _release_idle(self, generating: Collection[Slot]) -> list[int]:
        """Empty sequences of slots that generate nothing, until these hold at most `held_cells`. Returns them.

        A run that generates nothing in this tick, because it is the turn of jobs with other adapters, keeps its cells.
        """
        busy = {slot.index for slot in generating}
        idle = sorted(
            (
                index
                for index, one in enumerate(self._sequences)
                if one.tokens and index not in busy and not one.is_used
            ),
            key=lambda index: self._sequences[index].used,
        )
        emptied = []
        n_held = sum(len(self._sequences[index].tokens) for index in idle)
        for index in idle:
            if n_held <= self._held_cells:
                break
            n_held -= len(self._sequences[index].tokens)
            self._empty(index)
            emptied.append(index)
        return emptied

    def _make_room(self, slot: Slot, n_cells: int, wanted: Collection[Slot], emptied: list[int]) -> bool:
        """Empty sequences of slots that want no draft, least recently used first, until the slot has `n_cells`.

        Returns:
            False if there are not enough cells. Then no sequence is emptied.
        """
        n_needed = n_cells - len(self._sequences[slot.index].tokens)
        kept = {slot.index for slot in wanted}
        others = [index for index, one in enumerate(self._sequences) if one.tokens and index not in kept]
        others.sort(key=lambda index: self._sequences[index].used)
        n_free = self._n_cells - self.n_used - self._n_reserved
        if n_needed > n_free + sum(len(self._sequences[index].tokens) for index in others):
            return False
        for index in others:
            if n_needed <= n_free:
                break
            n_free += len(self._sequences[index].tokens)
            self._empty(index)
            emptied.append(index)
        return True

    def _add(self, part: DraftPart) -> None:
        sequence = self._sequences[part.slot.index]
        del sequence.tokens[part.n_kept :]
        sequence.tokens.extend(part.slot.active.tokens[part.n_kept : part.n_past])
        sequence.n_equal = part.n_past
        sequence.scope, sequence.n_usable = _scope_of(part.slot.active), sys.maxsize
        sequence.used = self._n_plans

    def _empty(self, index: int) -> None:
        self._sequences[index] = _Sequence()

    def __repr__(self) -> str:
        return f"<DraftSequences {self.n_used}/{self._n_cells} cells>"


def _scope_of(run: Run) -> Scope | None:
    """Return the jobs that may use the tokens of a run. None: no other job."""
    return run.job.scope if run.job.request.cache_prompt else None


def _n_usable(held: Scope | None, scope: Scope | None) -> int:
    """Return how many first tokens a job of `scope` may use of a sequence whose last job had the scope `held`."""
    if held is None or scope is None:
        return 0
    n_shared = held.n_shared(scope)
    return sys.maxsize if n_shared is None else n_shared
