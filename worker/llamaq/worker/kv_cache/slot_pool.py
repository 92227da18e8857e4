"""The pool: to whom a worker's slots, sequences and KV cells belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.core.tokens import common_prefix
from llamaq.worker.kv_cache.cell_ledger import CellLedger


class SlotPool:
    """All slots of a worker, and to whom its sequences and KV cells belong.

    A sequence belongs to a running job, is kept by the prefix cache, or is free. Cells are only counted here: those
    that sequences hold, a shared one once, and those that running jobs may still need are never more than there are.
    """

    def __init__(
        self, n_slots: int, n_cells: int, n_sequences: int, *, similarity: float = 0.0, shares_cells: bool = True
    ) -> None:
        """`similarity`: the share of a prompt that a slot's content must begin with for the slot to be preferred.

        Without `shares_cells` a copied sequence has cells of its own.
        """
        if n_sequences < n_slots:
            raise ValueError(f"{n_slots} slots need as many sequences, there are {n_sequences}")
        self.slots = tuple(Slot(index) for index in range(n_slots))
        self.n_cells = n_cells
        self.ledger = CellLedger(n_cells)
        self._similarity = similarity
        self._shares_cells = shares_cells
        self._sequences = frozenset(range(n_sequences))
        self._free = list(range(n_sequences))[::-1]
        self._kept: set[int] = set()
        self._n_acquired = 0
        self._n_released = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.run is not None]

    @property
    def n_idle(self) -> int:
        return sum(slot.run is None for slot in self.slots)

    @property
    def n_free(self) -> int:
        """Sequences that nobody has."""
        return len(self._free)

    @property
    def has_spare_sequences(self) -> bool:
        """Whether there are more sequences than slots."""
        return len(self._sequences) > len(self.slots)

    @property
    def kept(self) -> AbstractSet[int]:
        """Sequences that the prefix cache keeps."""
        return self._kept

    @property
    def promised_cells(self) -> int:
        """Cells that running jobs may still need."""
        return sum(slot.run.promised_cells for slot in self.slots if slot.run is not None)

    @property
    def is_overdrawn(self) -> bool:
        """Whether more cells are promised than there are."""
        return self.ledger.used + self.promised_cells > self.n_cells

    # ---- room

    def missing_cells(self, job: Job, n_shared: int = 0) -> int:
        """How many cells too few are left for a job that shares its first `n_shared`, 0 when there are enough."""
        return self.missing(job.reservation - n_shared)

    def missing(self, n_cells: int) -> int:
        """How many cells too few are left for so many new ones, 0 when there are enough."""
        return max(0, self.ledger.used + self.promised_cells + n_cells - self.n_cells)

    def has_slot(self, job: Job) -> bool:
        """Whether the job's slot, or any slot, is idle."""
        pinned = job.request.slot
        return any(slot.run is None for slot in (self.slots if pinned is None else self.slots[pinned : pinned + 1]))

    def slot_for(self, job: Job) -> Slot | None:
        """The idle slot that the job would get: the one it asks for, else one whose content it begins with, else
        the one that has been idle longest.
        """
        if job.request.slot is not None:
            pinned = self.slots[job.request.slot]
            return pinned if pinned.run is None else None
        idle = [slot for slot in self.slots if slot.run is None]
        likeness = {slot: self._likeness(slot, job) for slot in idle}
        return max(idle, key=lambda slot: (likeness[slot], -slot.release_number, -slot.index), default=None)

    def _likeness(self, slot: Slot, job: Job) -> float:
        if not slot.content or not self._similarity:
            return 0.0
        likeness = common_prefix(slot.content, job.packed) / max(1, len(job.prompt) + len(job.resumed))
        return likeness if likeness >= self._similarity else 0.0

    def could_acquire(self, job: Job, without: Sequence[Slot] = ()) -> bool:
        """Whether the job could enter if every kept sequence were reclaimed, and these slots were idle."""
        reserved = sum(slot.active.job.reservation for slot in self.active if slot not in without)
        has_slot = self.has_slot(job) or any(job.request.slot in (None, slot.index) for slot in without)
        return has_slot and reserved + job.reservation <= self.n_cells

    # ---- who has which sequence

    def acquire(self, job: Job, now_s: float, kept: int | None = None) -> Slot:
        """Give the job a slot, and a free sequence or one that was `kept`; call only when there is room."""
        slot = self.slot_for(job)
        if slot is None:
            raise LookupError(f"no slot is idle for {job!r}")
        if kept is None:
            seq_id = self._free.pop()
        else:
            seq_id = kept
            self._kept.remove(kept)
        self._n_acquired += 1
        tokens = [*job.prompt, *job.resumed]
        slot.run = Run(job, seq_id, tokens, admission_number=self._n_acquired, packed=job.packed, admitted_s=now_s)
        slot.transition_to(SlotState.PREFILL)
        return slot

    def release(self, slot: Slot) -> Run:
        """Take the job out of its slot. Its sequence is kept, with the cells that it holds, until `reclaim`."""
        run = slot.active
        slot.transition_to(SlotState.IDLE)
        slot.run, run.is_released = None, True
        self._n_released += 1
        slot.content, slot.release_number = run.packed_history(len(run.tokens)), self._n_released
        slot.scope = run.job.scope
        self._kept.add(run.seq_id)
        return run

    def keep_another(self) -> int:
        """A free sequence, kept from now on."""
        seq_id = self._free.pop()
        self._kept.add(seq_id)
        return seq_id

    def reclaim(self, seq_id: int) -> None:
        """A kept sequence was removed from KV memory: it is free for another job."""
        self._kept.remove(seq_id)
        self.ledger.drop(seq_id)
        self._free.append(seq_id)

    # ---- how many cells

    def hold(self, seq_id: int, n_tokens: int) -> None:
        """A sequence holds so many cells now."""
        if n_tokens < self.ledger.held(seq_id):
            self.ledger.cut(seq_id, n_tokens)
        else:
            self.ledger.grow(seq_id, n_tokens)

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """The first cells of `source` were copied to `target`, which was empty."""
        if self._shares_cells:
            self.ledger.share(source, target, n_tokens)
        else:
            self.ledger.grow(target, n_tokens)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when slots, sequences and cells contradict each other."""
        used = [slot.active.seq_id for slot in self.active]
        if sorted([*used, *self._kept, *self._free]) != sorted(self._sequences):
            raise AssertionError(f"sequences are not owned once: used={used} kept={self._kept} free={self._free}")
        self.ledger.check_integrity()
        if self.is_overdrawn:
            raise AssertionError(
                f"{self.ledger.used} + {self.promised_cells} cells are given, there are {self.n_cells}"
            )
        if any(self.ledger.held(seq_id) for seq_id in self._free):
            raise AssertionError("a free sequence holds cells")
        for slot in self.slots:
            if (slot.run is None) != (slot.state is SlotState.IDLE):
                raise AssertionError(f"{slot!r}: state and job contradict each other")
            if slot.run is not None:
                self._check_run(slot, slot.run)

    def _check_run(self, slot: Slot, run: Run) -> None:
        if not 0 <= run.n_past < len(run.tokens) < run.job.context_limit:
            raise AssertionError(f"{slot!r}: n_past={run.n_past} tokens={len(run.tokens)} of {run.job.context_limit}")
        if slot.state is SlotState.DECODE and run.n_pending != 1:
            raise AssertionError(f"{slot!r}: {run.n_pending} tokens are pending in DECODE")
        if (slot.state is SlotState.FOLLOW) != (run.leader is not None):
            raise AssertionError(f"{slot!r}: follows {run.leader!r}")
        if run.tokens[: run.n_prompt] != run.job.prompt:
            raise AssertionError(f"{slot!r}: the history does not begin with the prompt")
        if self.ledger.held(run.seq_id) != run.n_past:
            raise AssertionError(f"{slot!r}: n_past={run.n_past}, but {self.ledger.held(run.seq_id)} cells are held")
