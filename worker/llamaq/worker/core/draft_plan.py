"""The work of the draft model before a tick: the plan, and the report."""

from __future__ import annotations

from dataclasses import dataclass

from llamaq.worker.core.slot import Slot

STEP_TOKENS = 2
"""Largest number of missing tokens that the first step of a draft computes: the last sampled token, and the last
token of the draft before, if it was accepted. More missing tokens are computed before the first step."""


@dataclass(frozen=True, slots=True)
class DraftPart:
    """The work for one slot. The slot's index is the id of its sequence in the context of the draft model."""

    slot: Slot
    n_kept: int
    """Number of tokens at the start of the history that the sequence holds. The draft model removes all others."""
    n_missing: int
    """Number of tokens of the history to compute after these."""
    n_tokens: int
    """Largest number of tokens to draft. 0: the sequence still lacks tokens of the history after this tick."""

    @property
    def n_past(self) -> int:
        """Number of tokens of the history that the sequence holds afterwards."""
        return self.n_kept + self.n_missing

    @property
    def n_before_steps(self) -> int:
        """Number of missing tokens to compute before the first step."""
        if not self.n_tokens:
            return self.n_missing
        return self.n_missing - 1 if self.n_missing > STEP_TOKENS else 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The work of the draft model before one tick. An empty plan is false."""

    parts: tuple[DraftPart, ...] = ()
    """The work for each slot. All missing tokens together fit into one batch of the draft model."""
    emptied: tuple[int, ...] = ()
    """Sequences to empty first, because their cells are needed."""

    def __bool__(self) -> bool:
        return bool(self.parts or self.emptied)


NO_DRAFT_PLAN = DraftPlan()


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What the draft model has computed for a plan."""

    n_before_steps: int = 0
    """Number of missing tokens that were computed before the first step."""
    before_steps_s: float = 0.0
    """Time of these tokens, in seconds."""
    n_steps: int = 0
    """Number of steps. Each step computes the next token of every draft in one batch."""
    n_step_drafts: int = 0
    """Number of drafts of all steps together: a draft takes part in the steps until it ends."""
    steps_s: float = 0.0
    """Time of all steps, in seconds."""
    lost: frozenset[int] = frozenset()
    """Sequences that are empty now, because they could not be cut."""
    has_failed: bool = False
    """Whether the draft model has failed: all its sequences are empty, and it drafts nothing more."""

    @property
    def seconds(self) -> float:
        """Time of the whole work."""
        return self.before_steps_s + self.steps_s


NO_DRAFT_WORK = DraftWork()
