"""The pool of a worker's slots: assigns slots, sequences and KV cells to jobs, and records these assignments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import ceil

from llamaq.worker.core.job import Job
from llamaq.worker.core.packed_tokens import TOKEN_BYTES, common_prefix
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.kv_cache.cell_ledger import CellLedger

MAX_DOUBLINGS = 24
"""Upper bound on the doublings of a margin, so that the shift stays small. No context has more than 2**24 cells."""


class SlotPool:
    """Assigns the slots, sequences and KV cells of a worker.

    A sequence belongs to a running job, belongs to the prefix cache, or is free. The pool counts cells, but does not
    record which cell belongs to which sequence.

    A running job holds the cells of its history and takes one more cell with each token. The pool does not reserve
    cells for all tokens that a job may generate, because most jobs end earlier. There are three bounds:

    - A job is admitted only if there is room for its history and a margin, and for the margins of the running jobs.
    - When the margins of the running jobs no longer fit, `missing_cells` reports it, and entries are evicted.
    - Invariant between ticks: at most `n_cells` cells are held by sequences or still needed by running jobs for the
      tokens that they already have. A shared cell counts once.

    Args:
        n_slots: Number of slots.
        n_cells: Number of KV cells.
        n_sequences: Number of sequences, at least `n_slots`.
        similarity: A fraction of the prompt. A slot is preferred when the common prefix of its content and the prompt
            has at least this length. 0 disables the preference.
        shares_cells: Whether a copied sequence shares its cells with its source. If False, a copy uses additional
            cells.
        margin: Number of cells for future tokens that the admission of a job reserves, in addition to its history.
    """

    def __init__(
        self,
        n_slots: int,
        n_cells: int,
        n_sequences: int,
        *,
        similarity: float = 0.0,
        shares_cells: bool = True,
        margin: int = 64,
    ) -> None:
        if n_sequences < n_slots:
            raise ValueError(f"{n_slots} slots need as many sequences, there are {n_sequences}")
        self.slots = tuple(Slot(index) for index in range(n_slots))
        self.active_slots: tuple[Slot, ...] = ()
        """The slots that run a job. Replaced when a job enters or leaves a slot, because each tick reads it often."""
        self.n_cells = n_cells
        self.ledger = CellLedger(n_cells)
        self._similarity = similarity
        self._shares_cells = shares_cells
        self._margin = margin
        self._sequences = frozenset(range(n_sequences))
        self._free = list(range(n_sequences))[::-1]
        self._cached: set[int] = set()
        self._all_logits: set[int] = set()
        """The sequences whose last job needed all logits."""
        self._n_acquired = 0
        self._n_released = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def n_idle(self) -> int:
        """Number of idle slots."""
        return len(self.slots) - len(self.active_slots)

    @property
    def n_free_sequences(self) -> int:
        """Number of sequences that have no owner."""
        return len(self._free)

    @property
    def has_spare_sequences(self) -> bool:
        """Whether there are more sequences than slots."""
        return len(self._sequences) > len(self.slots)

    @property
    def cached(self) -> AbstractSet[int]:
        """The sequences that belong to the prefix cache."""
        return self._cached

    @property
    def promised_cells(self) -> int:
        """Number of cells that the running jobs need for their histories and margins and do not hold yet."""
        return self._promised(self._margin)

    @property
    def reserved_cells(self) -> int:
        """Number of cells that the running jobs hold or have been promised. A shared cell counts for each holder."""
        return self.promised_cells + sum(slot.active.n_past for slot in self.active_slots)

    @property
    def unpromised_cells(self) -> int:
        """Number of cells that are neither used nor needed for the histories of the running jobs. May be negative."""
        return self.n_cells - self.ledger.used - self._promised(0)

    def lacks_cells(self, n_ahead: int = 0) -> bool:
        """Whether the running jobs need more cells than exist, for their histories and the next `n_ahead` tokens."""
        return self.ledger.used + self._promised(min(n_ahead, self._margin)) > self.n_cells

    def _promised(self, margin: int) -> int:
        return sum([slot.active.promised_cells(margin) for slot in self.active_slots])

    # ---- room for a job

    @property
    def free_cells(self) -> int:
        """Number of cells that are neither used nor promised. May be negative."""
        return self.n_cells - self.ledger.used - self.promised_cells

    def missing_cells(self, n_cells: int) -> int:
        """Return how many cells are missing to reserve `n_cells` more cells, 0 when enough cells are free."""
        return max(0, n_cells - self.free_cells)

    def has_slot(self, job: Job) -> bool:
        """Whether a slot that the job can use is idle."""
        pinned = job.request.slot
        return self.n_idle > 0 if pinned is None else self.slots[pinned].run is None

    def cells_to_admit(self, job: Job) -> int:
        """Return how many cells the admission of the job needs: its history and a margin.

        The margin doubles each time the job loses its slot because cells ran out. Without this, the job would soon lose
        its next slot too.
        """
        return min(job.n_history + (self._margin << min(job.n_out_of_cells, MAX_DOUBLINGS)), job.max_length)

    def could_admit(self, job: Job, without: Sequence[Slot] = (), *, n_shared: int = 0) -> bool:
        """Whether there would be room for the job if nothing were cached and the slots in `without` were idle.

        Args:
            job: A waiting job.
            without: Slots that run a job.
            n_shared: Number of cells that the job would share with the jobs in the other slots.
        """
        if not self.has_slot(job) and all(job.request.slot not in (None, slot.index) for slot in without):
            return False
        gone = self._cached | {slot.active.seq_id for slot in without}
        n_used = self.ledger.used - self.ledger.owned_together(gone)
        n_promised = sum(slot.active.promised_cells(self._margin) for slot in self.active_slots if slot not in without)
        return n_used + n_promised + self.cells_to_admit(job) - n_shared <= self.n_cells

    def _choose_slot(self, job: Job) -> Slot | None:
        """Return the idle slot for the job, or None.

        If the job requests a slot, only this slot can be returned. Otherwise the slot is preferred whose content has
        the longest common prefix with the prompt. If there is no such slot, the slot that has been idle longest is
        returned.
        """
        if job.request.slot is not None:
            pinned = self.slots[job.request.slot]
            return pinned if pinned.run is None else None
        idle = [slot for slot in self.slots if slot.run is None]
        n_similar = ceil(self._similarity * job.n_history)
        if n_similar:
            similar = job.packed[: n_similar * TOKEN_BYTES]
            idle = self._most_similar([slot for slot in idle if slot.content.startswith(similar)], job) or idle
        return min(idle, key=lambda slot: (slot.release_number, slot.index), default=None)

    def _most_similar(self, slots: list[Slot], job: Job) -> list[Slot]:
        """Return the slots whose content has the longest common prefix with the prompt."""
        if len(slots) < 2:
            return slots
        if same := [slot for slot in slots if slot.content.startswith(job.packed)]:
            return same
        prefixes = {slot: common_prefix(slot.content, job.packed) for slot in slots}
        longest = max(prefixes.values())
        return [slot for slot, n_tokens in prefixes.items() if n_tokens == longest]

    # ---- owners of sequences

    def acquire(self, job: Job, now_s: float, adopted: int | None = None) -> Slot:
        """Give the job an idle slot and a sequence. The caller has checked that there is room.

        Args:
            job: The job.
            now_s: Time of admission.
            adopted: The cached sequence that becomes the job's sequence. None gives it a free sequence.

        Raises:
            LookupError: No slot is idle.
        """
        slot = self._choose_slot(job)
        if slot is None:
            raise LookupError(f"no slot is idle for {job!r}")
        if adopted is None:
            seq_id = self._take_free(job)
        else:
            seq_id = adopted
            self._cached.remove(adopted)
        if job.needs_all_logits:
            self._all_logits.add(seq_id)
        else:
            self._all_logits.discard(seq_id)
        self._n_acquired += 1
        tokens = [*job.prompt, *job.generated_before]
        slot.run = Run(job, seq_id, tokens, admission_number=self._n_acquired, packed=job.packed, admitted_s=now_s)
        slot.transition_to(SlotState.PREFILL)
        self._find_active()
        return slot

    def _take_free(self, job: Job) -> int:
        """Take a free sequence. One is preferred whose last job needed as many logits as this job.

        With `--backend-sampling`, llama.cpp plans its computation again when a sequence changes this.
        """
        needs_all = job.needs_all_logits
        indices = range(len(self._free) - 1, -1, -1)
        alike = next((index for index in indices if (self._free[index] in self._all_logits) is needs_all), -1)
        return self._free.pop(alike)

    def release(self, slot: Slot) -> Run:
        """Make the slot idle and return its run. The sequence of the run then belongs to the prefix cache.

        The sequence keeps its cells until `free_sequence`.
        """
        run = slot.active
        slot.transition_to(SlotState.IDLE)
        slot.run, run.is_released = None, True
        self._find_active()
        self._n_released += 1
        slot.content, slot.release_number = run.packed_history(len(run.tokens)), self._n_released
        slot.scope = run.job.scope
        self._cached.add(run.seq_id)
        return run

    def _find_active(self) -> None:
        self.active_slots = tuple(slot for slot in self.slots if slot.run is not None)

    def acquire_for_cache(self) -> int:
        """Give a free sequence to the prefix cache and return it."""
        seq_id = self._free.pop()
        self._cached.add(seq_id)
        return seq_id

    def free_sequence(self, seq_id: int) -> None:
        """Record that a cached sequence was removed from KV memory and is free."""
        self._cached.remove(seq_id)
        self.ledger.drop(seq_id)
        self._free.append(seq_id)

    # ---- cells of sequences

    def resize(self, seq_id: int, n_tokens: int) -> None:
        """Record that a sequence now holds `n_tokens` cells."""
        self.ledger.resize(seq_id, n_tokens)

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """Record that the first `n_tokens` cells of `source` were copied to the empty sequence `target`."""
        if self._shares_cells:
            self.ledger.share(source, target, n_tokens)
        else:
            self.ledger.grow(target, n_tokens)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when slots, sequences and cells contradict each other."""
        if self.active_slots != tuple(slot for slot in self.slots if slot.run is not None):
            raise AssertionError(f"the slots with a job are not {self.active_slots}")
        used = [slot.active.seq_id for slot in self.active_slots]
        if sorted([*used, *self._cached, *self._free]) != sorted(self._sequences):
            raise AssertionError(
                f"a sequence has no owner or two owners: used={used} cached={self._cached} free={self._free}"
            )
        self.ledger.check_integrity()
        if self.lacks_cells():
            raise AssertionError(
                f"{self.ledger.used} cells are used and {self._promised(0)} needed, there are {self.n_cells}"
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
        if run.scores_prompt and len(run.prompt_rows) != run.n_prompt_row_bytes:
            raise AssertionError(f"{slot!r}: there are {len(run.prompt_rows)} bytes of probabilities of the prompt")
        if self.ledger.held(run.seq_id) != run.n_past:
            raise AssertionError(f"{slot!r}: n_past={run.n_past}, but {self.ledger.held(run.seq_id)} cells are held")
