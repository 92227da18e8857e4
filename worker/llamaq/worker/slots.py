"""Slots: a worker's lanes, each with at most one running job, and the table of their states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from llamaq.common.messages import Priority
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
    started_s: float = field(default_factory=time.monotonic)
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
    """All slots of a worker, and which sequence and how many KV cells each one has."""

    def __init__(self, n_slots: int, n_cells: int, n_sequences: int) -> None:
        if n_sequences < n_slots:
            raise ValueError(f"{n_slots} slots need as many sequences, there are {n_sequences}")
        self.slots = tuple(Slot(index) for index in range(n_slots))
        self.n_cells = n_cells
        self._free_sequences = list(range(n_sequences))[::-1]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.run is not None]

    @property
    def n_idle(self) -> int:
        return len(self.slots) - len(self.active)

    @property
    def reserved_cells(self) -> int:
        """KV cells promised to running jobs."""
        return sum(slot.active.job.reservation for slot in self.active)

    def can_acquire(self, job: Job) -> bool:
        """Whether a slot is idle and the job's cells can be reserved now."""
        return self.n_idle > 0 and self.reserved_cells + job.reservation <= self.n_cells

    def acquire(self, job: Job) -> Slot:
        """Give the job a slot and a sequence; call only when `can_acquire`."""
        slot = next(slot for slot in self.slots if slot.run is None)
        slot.run = Run(job, self._free_sequences.pop(), [*job.prompt, *job.resumed])
        slot.move(SlotState.PREFILL)
        return slot

    def release(self, slot: Slot) -> Run:
        """Take the job out of its slot; its sequence may be given to another job."""
        run = slot.active
        slot.move(SlotState.IDLE)
        slot.run = None
        self._free_sequences.append(run.seq_id)
        return run

    def check_integrity(self) -> None:
        """Raise `AssertionError` when slots, sequences and cells contradict each other."""
        used = [slot.active.seq_id for slot in self.active]
        if len(set(used)) != len(used) or set(used) & set(self._free_sequences):
            raise AssertionError(f"a sequence has two owners: used={used} free={self._free_sequences}")
        if self.reserved_cells > self.n_cells:
            raise AssertionError(f"{self.reserved_cells} cells are promised, there are {self.n_cells}")
        for slot in self.slots:
            if (slot.run is None) != (slot.state is SlotState.IDLE):
                raise AssertionError(f"{slot!r}: state and job contradict each other")
            if slot.run and not 0 <= slot.run.n_past <= len(slot.run.tokens) <= slot.run.job.context_limit + 1:
                raise AssertionError(f"{slot!r}: n_past={slot.run.n_past} tokens={len(slot.run.tokens)}")
