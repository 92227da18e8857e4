"""Speculation: a drafter proposes the next tokens of a job, and the engine verifies them all in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llamaq.worker.core.draft_acceptance import DraftAcceptance


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow the history of a job."""

    tokens: tuple[int, ...] = ()
    """The tokens, the next one first."""
    grade: int = 0
    """How much the drafter relies on the draft, as an index: a higher grade is more reliable. The acceptance is
    estimated for each grade separately."""
    stopped_early: bool = False
    """Whether the draft has fewer tokens than wanted, because the drafter found no probable next token."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, n_tokens: int) -> Draft:
        """Return the draft without the tokens after the first `n_tokens`."""
        return self if n_tokens >= len(self.tokens) else Draft(self.tokens[:n_tokens], self.grade)

    @property
    def n_places(self) -> int:
        """Number of places for which the drafter looked for a token: one more than tokens if it stopped early."""
        return len(self.tokens) + self.stopped_early


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Proposes drafts for one job."""

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        """Return at most `n_max` tokens that may follow, no token if the drafter has no proposal.

        A second call with the same arguments returns the same draft.

        Args:
            history: The prompt, then the generated tokens. Each history begins with that of the last call.
            n_max: Largest number of tokens, at least 1.
        """


@dataclass(slots=True, eq=False)
class Drafting:
    """The speculation of one job."""

    drafter: Drafter | None
    """Proposes the drafts. None: the draft model of the worker does, for all jobs in one batch."""
    n_max: int
    """Largest number of tokens of one draft."""
    n_drafted: int = 0
    """Number of draft tokens that were verified."""
    n_accepted: int = 0
    """Number of draft tokens that became tokens of the output."""
    longest: int = 1
    """Largest number of tokens of the next draft of `drafter`. It grows while drafts are accepted as a whole, because a
    few accepted tokens tell little about a long draft."""
    acceptance: dict[int, DraftAcceptance] = field(default_factory=dict)
    """Maps the grades of the drafts so far to how many of their tokens are accepted."""
