"""Drafts from the job's own text (prompt lookup): what followed the last tokens when they occurred before.

Edited code, extracted facts and answers that quote their prompt repeat long parts of it. The occurrences are found as
in LZ77 compression: a dict has the last position of each n-gram, and each position has the one before it with the
same n-gram. So a new token takes the same short time in texts of any length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from llamaq.worker.core.token_draft import NO_DRAFT, Draft

N_GRAM = 3
"""Number of last tokens that must have occurred before."""
MAX_OCCURRENCES = 4
"""Number of newest occurrences that are compared."""
GRADE_MATCHES = (4, 8, 16)
"""A draft has grade 1, 2 or 3 if at least this many tokens before it are equal. Comparing ends with the last number."""


class NgramDrafter:
    """Finds the longest earlier occurrence of the end of the history. Implements `core.token_draft.Drafter`.

    Args:
        history: The prompt, and the tokens that earlier attempts generated.
    """

    def __init__(self, history: Sequence[int]) -> None:
        self._last: dict[int, int] = {}
        """Maps an n-gram, as one number, to the last position at which it ends."""
        self._before: array[int] = array("i")
        """Maps a position to the last one before it at which the same n-gram ends, or to -1."""
        self._read(history)

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        """Return what followed the best occurrence; see `Drafter.propose`.

        The best occurrence has the longest part in common with the end of the history. Of several, it is the newest.
        """
        self._read(history)
        end = len(history) - 1
        best, n_best, position = -1, 0, self._before[end] if end >= 0 else -1
        for _ in range(MAX_OCCURRENCES):
            if position < 0 or n_best == GRADE_MATCHES[-1]:
                break
            n_equal = _count_equal(history, position, end)
            if n_equal > n_best:
                best, n_best = position, n_equal
            position = self._before[position]
        if best < 0:
            return NO_DRAFT
        return Draft(_following(history, best, n_max), sum(n_best >= least for least in GRADE_MATCHES))

    def _read(self, history: Sequence[int]) -> None:
        """Add the n-grams that end with a new token."""
        last, before = self._last, self._before
        for position in range(len(before), len(history)):
            if position < N_GRAM - 1:
                before.append(-1)
                continue
            ngram = history[position] | history[position - 1] << 32 | history[position - 2] << 64
            before.append(last.get(ngram, -1))
            last[ngram] = position

    def __repr__(self) -> str:
        return f"<NgramDrafter {len(self._before)} tokens>"


def _count_equal(history: Sequence[int], position: int, end: int) -> int:
    """Return how many tokens up to `position` equal those up to `end`. Counting ends with the last grade."""
    limit = min(GRADE_MATCHES[-1], position + 1)
    n_equal = N_GRAM
    while n_equal < limit and history[position - n_equal] == history[end - n_equal]:
        n_equal += 1
    return n_equal


def _following(history: Sequence[int], position: int, n_tokens: int) -> tuple[int, ...]:
    """Return the `n_tokens` tokens after `position`. They repeat if the history ends before."""
    following = tuple(history[position + 1 : position + 1 + n_tokens])
    period = len(history) - 1 - position
    if len(following) < n_tokens:
        following = (following * (n_tokens // period + 1))[:n_tokens]
    return following
