"""What became of the drafts of a job: how probable it is that the next ones are accepted, and when to try again."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_WEIGHT = 2.0
"""The first estimate of a probability counts as many outcomes as this."""
DECAY = 0.8
"""Weight of a draft in the estimate of its job, compared with the next newer draft of the same grade."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""After this many drafts in a row that promise no gain, one is tried all the same. The pause doubles when it fails."""


class Acceptance:
    """Estimates the probability that a draft token is accepted if all tokens of the draft before it were accepted.

    Args:
        probability: The first estimate.
        decay: Weight of a draft in the estimate, compared with the next newer draft.
    """

    def __init__(self, probability: float, decay: float = DECAY) -> None:
        self._decay = decay
        self._accepted = PRIOR_WEIGHT * probability
        self._rejected = PRIOR_WEIGHT - self._accepted

    @property
    def probability(self) -> float:
        """The estimate."""
        return self._accepted / (self._accepted + self._rejected)

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """Record the outcome of a draft. After the first token that is not accepted, the others tell nothing."""
        self._accepted = self._decay * self._accepted + n_accepted
        self._rejected = self._decay * self._rejected + (n_accepted < n_drafted)

    def __repr__(self) -> str:
        return f"<Acceptance {self.probability:.2f}>"


class Retries:
    """Decides when a draft is tried although its estimated acceptance promises no gain: the text may have changed."""

    def __init__(self) -> None:
        self._n_passed = 0
        self._pause = FIRST_PAUSE

    def is_due(self) -> bool:
        """Count a draft that promises no gain, and return whether it is tried all the same."""
        self._n_passed += 1
        return self._n_passed >= self._pause

    def record(self, n_accepted: int) -> None:
        """Record the outcome of a draft."""
        if n_accepted:
            self._pause = FIRST_PAUSE
        elif self._n_passed >= self._pause:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._n_passed = 0


@dataclass(slots=True)
class GradeRecord:
    """What became of the drafts of one grade of a job."""

    acceptance: Acceptance
    retries: Retries = field(default_factory=Retries)
