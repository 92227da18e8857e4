"""Slots: a worker's lanes, each with at most one running job, and the table of their states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from llamaq.common.messages import Priority, SlotSnapshot
from llamaq.worker.jobs import Job


class SlotState(Enum):
    """What a slot is doing."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


# A slot goes from IDLE through PREFILL and DECODE back to IDLE; any job may end early, and one whose cells were
# lost is prefilled again.
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.IDLE: frozenset({SlotState.PREFILL}),
    SlotState.PREFILL: frozenset({SlotState.DECODE, SlotState.IDLE}),
    SlotState.DECODE: frozenset({SlotState.PREFILL, SlotState.IDLE}),
}


@dataclass(slots=True, eq=False)
class Run:
    """A job in a slot: its sequence, and how far it has come."""

    job: Job
    seq_id: int
    tokens: list[int]
    """History: prompt, then generated tokens."""
    n_past: int = 0
    """Tokens of the history whose KV cells the sequence holds."""
    cached_tokens: int = 0
    """How many of those came from the prefix cache."""
    admitted_s: float = 0.0
    """When it got its slot, by the scheduler's clock."""
    prefilled_s: float | None = None
    """When the first token of this attempt was sampled."""

    @property
    def n_prompt(self) -> int:
        return len(self.job.prompt)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens of the history that are not in KV memory yet: 1 while decoding, more during prefill."""
        return len(self.tokens) - self.n_past


@dataclass(slots=True, eq=False)
class Slot:
    """One lane. `run` is set exactly when the state is not IDLE."""

    index: int
    state: SlotState = SlotState.IDLE
    run: Run | None = None

    @property
    def active(self) -> Run:
        """The running job; asking an idle slot is a defect."""
        if self.run is None:
            raise LookupError(f"{self!r} runs no job")
        return self.run

    @property
    def n_pending(self) -> int:
        """Tokens that wait to be put into KV memory, 0 when idle."""
        return self.run.n_pending if self.run else 0

    @property
    def priority(self) -> Priority | None:
        return self.run.job.request.priority if self.run else None

    def snapshot(self) -> SlotSnapshot:
        """The slot as others may see it."""
        run = self.run
        if run is None:
            return SlotSnapshot(index=self.index, state=self.state.value)
        return SlotSnapshot(
            index=self.index,
            state=self.state.value,
            job_id=run.job.id,
            prompt_tokens=run.n_prompt,
            prefilled_tokens=min(run.n_past, run.n_prompt),
            generated_tokens=run.n_generated,
        )

    def move(self, state: SlotState) -> None:
        """Change the state along the table of allowed transitions."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self!r} cannot go to {state.name}")
        self.state = state

    def __repr__(self) -> str:
        if self.run is None:
            return f"<Slot {self.index} {self.state.name}>"
        run = self.run
        if self.state is SlotState.PREFILL:
            progress = f"{run.n_past}/{len(run.tokens)}"
        else:
            progress = f"{run.n_generated}/{run.job.request.max_tokens}"
        return f"<Slot {self.index} {self.state.name} {progress} job={run.job.id}>"


class SlotPool:
    """All slots of a worker, and to whom its sequences and KV cells belong.

    A sequence belongs to a running job, is kept by the prefix cache, or is free. Cells are only counted here:
    those promised to running jobs and those that kept sequences hold are never more than there are. Kept
    sequences may share cells with others in KV memory, so the count errs on the safe side.
    """

    def __init__(self, n_slots: int, n_cells: int, n_sequences: int) -> None:
        if n_sequences < n_slots:
            raise ValueError(f"{n_slots} slots need as many sequences, there are {n_sequences}")
        self.slots = tuple(Slot(index) for index in range(n_slots))
        self.n_cells = n_cells
        self._sequences = frozenset(range(n_sequences))
        self._free = list(range(n_sequences))[::-1]
        self._kept: dict[int, int] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.run is not None]

    @property
    def n_idle(self) -> int:
        return len(self.slots) - len(self.active)

    @property
    def n_kept(self) -> int:
        """Sequences that the prefix cache keeps."""
        return len(self._kept)

    @property
    def reserved_cells(self) -> int:
        """KV cells promised to running jobs."""
        return sum(slot.active.job.reservation for slot in self.active)

    @property
    def kept_cells(self) -> int:
        """KV cells that kept sequences hold."""
        return sum(self._kept.values())

    def missing_cells(self, job: Job) -> int:
        """How many cells too few are left for the job, 0 when there are enough."""
        return max(0, self.reserved_cells + self.kept_cells + job.reservation - self.n_cells)

    def can_acquire(self, job: Job) -> bool:
        """Whether a slot is idle, a sequence free, and the job's cells can be reserved now."""
        return self.n_idle > 0 and bool(self._free) and self.missing_cells(job) == 0

    def could_acquire(self, job: Job) -> bool:
        """Whether `can_acquire` would be true if every kept sequence were reclaimed."""
        return self.n_idle > 0 and self.reserved_cells + job.reservation <= self.n_cells

    def acquire(self, job: Job, now_s: float) -> Slot:
        """Give the job a slot and a sequence; call only when `can_acquire`."""
        slot = next(slot for slot in self.slots if slot.run is None)
        slot.run = Run(job, self._free.pop(), [*job.prompt, *job.resumed], admitted_s=now_s)
        slot.move(SlotState.PREFILL)
        return slot

    def release(self, slot: Slot) -> Run:
        """Take the job out of its slot. Its sequence is kept, with the cells that it holds, until `reclaim`."""
        run = slot.active
        slot.move(SlotState.IDLE)
        slot.run = None
        self._kept[run.seq_id] = run.n_past
        return run

    def reclaim(self, seq_id: int) -> None:
        """A kept sequence was removed from KV memory: it is free for another job."""
        del self._kept[seq_id]
        self._free.append(seq_id)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when slots, sequences and cells contradict each other."""
        used = [slot.active.seq_id for slot in self.active]
        if sorted([*used, *self._kept, *self._free]) != sorted(self._sequences):
            raise AssertionError(f"sequences are not owned once: used={used} kept={self._kept} free={self._free}")
        if self.reserved_cells + self.kept_cells > self.n_cells:
            raise AssertionError(f"{self.reserved_cells} + {self.kept_cells} cells are given, there are {self.n_cells}")
        for slot in self.slots:
            if (slot.run is None) != (slot.state is SlotState.IDLE):
                raise AssertionError(f"{slot!r}: state and job contradict each other")
            if slot.run is not None:
                _check_run(slot, slot.run)


def _check_run(slot: Slot, run: Run) -> None:
    if not 0 <= run.n_past < len(run.tokens) < run.job.context_limit:
        raise AssertionError(f"{slot!r}: n_past={run.n_past} tokens={len(run.tokens)} of {run.job.context_limit}")
    if slot.state is SlotState.DECODE and run.n_pending != 1:
        raise AssertionError(f"{slot!r}: {run.n_pending} tokens are pending in DECODE")
    if run.tokens[: run.n_prompt] != run.job.prompt:
        raise AssertionError(f"{slot!r}: the history does not begin with the prompt")
