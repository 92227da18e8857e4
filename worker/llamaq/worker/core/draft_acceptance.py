"""Estimates how probable it is that a draft token is accepted."""

from __future__ import annotations

PRIOR_WEIGHT = 1.0
"""The first estimate has the weight of this number of recorded outcomes."""
DECAY = 0.85
"""Each draft of a job multiplies the weight of the job's earlier drafts of the same grade by this factor. The grade
says how much the drafter relies on a draft."""


class DraftAcceptance:
    """Estimates the probability that a draft token is accepted if all tokens of the draft before it were accepted.

    Args:
        probability: The first estimate.
        decay: Each later draft multiplies the weight of an earlier draft in the estimate by this factor.
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
        """Record the outcome of a draft. Tokens after the first rejected one do not count."""
        self._accepted = self._decay * self._accepted + n_accepted
        self._rejected = self._decay * self._rejected + (1 if n_accepted < n_drafted else 0)

    def __repr__(self) -> str:
        return f"<DraftAcceptance {self.probability:.2f}>"
