"""Slots: a worker's lanes, each with at most one running job, and the table of their states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.queue_state import SlotSnapshot
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.tokens import TOKEN_BYTES, pack


class SlotState(Enum):
    """What a slot is doing."""

    IDLE = "idle"
    FOLLOW = "follow"
    """Waiting for another job's prefill to pass what both prompts begin with."""
    LOAD = "load"
    """Waiting for cells that come from host memory or disk."""
    PREFILL = "prefill"
    DECODE = "decode"


# A slot goes from IDLE through PREFILL and DECODE back to IDLE. A job in PREFILL may find that its cells are coming
# from elsewhere; any job may end early, and one whose cells were lost is prefilled again.
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.IDLE: frozenset({SlotState.PREFILL}),
    SlotState.FOLLOW: frozenset({SlotState.PREFILL, SlotState.IDLE}),
    SlotState.LOAD: frozenset({SlotState.PREFILL, SlotState.IDLE}),
    SlotState.PREFILL: frozenset({SlotState.FOLLOW, SlotState.LOAD, SlotState.DECODE, SlotState.IDLE}),
    SlotState.DECODE: frozenset({SlotState.PREFILL, SlotState.IDLE}),
}

FARTHER = list(CacheTier)
"""The tiers, the nearest first."""

WORKING = frozenset({SlotState.PREFILL, SlotState.DECODE})
"""The states in which a slot has something for the next batch."""


@dataclass(slots=True, eq=False)
class Run:
    """A job in a slot: its sequence, and how far it has come."""

    job: Job
    seq_id: int
    tokens: list[int]
    """History: prompt, then generated tokens."""
    n_past: int = 0
    """Tokens of the history whose KV cells the sequence holds."""
    order: int = 0
    """Runs are numbered as they are admitted."""
    packed: bytes = b""
    """The history as it was at admission, packed."""
    stops: list[int] = field(default_factory=list)
    """Positions at which a chunk of the prefill must end, in order, because the state there is wanted."""
    leader: Run | None = None
    """In FOLLOW: whose prefill it waits for,"""
    shared_tokens: int = 0
    """and up to which token."""
    cached_tokens: int = 0
    """How many of `n_past` were not computed by this run, but shared or loaded."""
    tier: CacheTier | None = None
    """The farthest tier that those came from."""
    has_left: bool = False
    """It has no slot any more."""
    admitted_s: float = 0.0
    """When it got its slot, by the scheduler's clock."""
    prefilled_s: float | None = None
    """When its first token was sampled."""

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

    @property
    def cells_to_come(self) -> int:
        """Cells that are promised to it and not used yet."""
        return max(0, self.job.reservation - self.n_past)

    @property
    def may_be_preempted(self) -> bool:
        """Whether its job may have to give way to one of higher priority."""
        return self.n_generated >= self.job.turn_until

    def take_over(self, n_tokens: int, tier: CacheTier) -> None:
        """Its sequence holds so many tokens now, without having computed those that are new."""
        self.cached_tokens += n_tokens - self.n_past
        self.n_past = n_tokens
        self.tier = tier if self.tier is None else max(self.tier, tier, key=FARTHER.index)

    def packed_history(self, n_tokens: int) -> bytes:
        """The first tokens of the history, packed."""
        n_packed = len(self.packed) // TOKEN_BYTES
        if n_tokens <= n_packed:
            return self.packed[: n_tokens * TOKEN_BYTES]
        return self.packed + pack(self.tokens[n_packed:n_tokens])


@dataclass(slots=True, eq=False)
class Slot:
    """One lane. `run` is set exactly when the state is not IDLE."""

    index: int
    state: SlotState = SlotState.IDLE
    run: Run | None = None
    content: bytes = b""
    """The packed tokens of the job that ran here last: a job that begins like it comes back here."""
    scope: Scope = field(default_factory=Scope)
    """With whom its cells may be shared."""
    freed: int = 0
    """When that job left; a count, not a time."""

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
            n_content = len(self.content) // TOKEN_BYTES
            return SlotSnapshot(index=self.index, state=self.state.value, content_tokens=n_content)
        return SlotSnapshot(
            index=self.index,
            state=self.state.value,
            job_id=run.job.id,
            prompt_tokens=run.n_prompt,
            prefilled_tokens=min(run.n_past, run.n_prompt),
            generated_tokens=run.n_generated,
            content_tokens=run.n_past,
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
        if self.state is not SlotState.DECODE:
            progress = f"{run.n_past}/{len(run.tokens)}"
        else:
            progress = f"{run.n_generated}/{run.job.request.max_tokens}"
        return f"<Slot {self.index} {self.state.name} {progress} job={run.job.id}>"
