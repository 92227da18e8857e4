"""A drafter that knows what the fake model generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamaq.worker.core.draft import Draft
from llamaq.worker.testing import next_letter

NextToken = Callable[[Sequence[int]], int]
"""Returns the token that a fake model generates after a history."""


class Oracle:
    """Drafts the tokens that the model generates, the token at `wrong_at` excepted."""

    def __init__(self, next_token: NextToken = next_letter, wrong_at: int | None = None) -> None:
        self._next_token = next_token
        self._wrong_at = wrong_at

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        extended = list(history)
        for place in range(n_max):
            extended.append(ord("?") if place == self._wrong_at else self._next_token(extended))
        return Draft(tuple(extended[len(history) :]))
