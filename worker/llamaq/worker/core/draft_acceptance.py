"""Estimates how probable it is that a draft token is accepted."""

from __future__ import annotations

PRIOR_WEIGHT = 2.0
"""The first estimate counts as many outcomes as this."""
DECAY = 0.85
"""Weight of a draft in the estimate of its job, compared with the next newer draft of the same grade."""


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
