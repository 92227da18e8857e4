"""Drafts from the job's own text (prompt lookup): what followed the last tokens when they occurred before.

Edited code, extracted facts and answers that quote their prompt repeat long parts of it. The occurrences are found
with hash chains, as in LZ77 compression: a table has the last position of each hash of `N_GRAM` tokens, and each
position has the one before it with the same hash. So a new token takes the same short time in texts of any length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from llamaq.worker.core.token_draft import NO_DRAFT, Draft

N_GRAM = 3
"""Number of last tokens that must have occurred before."""
MAX_OCCURRENCES = 8
"""Number of newest occurrences that are compared."""
GRADE_MATCHES = (4, 8, 16)
"""A draft has grade 1, 2 or 3 if at least this many tokens before it are equal. Comparing ends with the last number."""
MAX_TABLE_BITS = 20
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
"""Odd numbers, by which the tokens are multiplied in a hash."""


class NgramDrafter:
    """Finds the longest earlier occurrence of the end of the history. Implements `core.token_draft.Drafter`.

    Args:
        history: The prompt, and the tokens that earlier attempts generated.
        n_expected: Number of tokens that the job may generate. Only the size of the table depends on it.
    """

    def __init__(self, history: Sequence[int], n_expected: int) -> None:
        n_bits = min((len(history) + n_expected).bit_length() + 1, MAX_TABLE_BITS)
        self._mask = (1 << n_bits) - 1
        self._last = array("i", [-1]) * (1 << n_bits)
        """Maps a hash to the last position at which an n-gram with this hash ends, -1 if there is none."""
        self._before: array[int] = array("i")
        """Maps a position to the last one before it at which an n-gram with the same hash ends, or to -1."""
        self._read(history)

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        """Return what followed the best occurrence; see `Drafter.propose`.

        The best occurrence has the longest part in common with the end of the history. Of several, it is the newest.
        """
        self._read(history)
        end = len(history) - 1
        best, n_best, position = -1, N_GRAM - 1, self._before[end] if end >= 0 else -1
        for _ in range(MAX_OCCURRENCES):
            if position < 0 or n_best >= GRADE_MATCHES[-1]:
                break
            n_equal = _count_equal(history, position, end)
            if n_equal > n_best:
                best, n_best = position, n_equal
            position = self._before[position]
        if best < 0:
            return NO_DRAFT
        return Draft(_following(history, best, n_max), sum(n_best >= least for least in GRADE_MATCHES))

    def _read(self, history: Sequence[int]) -> None:
        """Add the n-grams of the tokens that are new."""
        last, before, mask = self._last, self._before, self._mask
        first, second, third = _FACTORS
        for position in range(len(before), len(history)):
            if position < N_GRAM - 1:
                before.append(-1)
                continue
            hashed = history[position] * first + history[position - 1] * second + history[position - 2] * third
            hashed = (hashed ^ hashed >> 15) & mask
            before.append(last[hashed])
            last[hashed] = position

    def __repr__(self) -> str:
        return f"<NgramDrafter {len(self._before)} tokens>"


def _count_equal(history: Sequence[int], position: int, end: int) -> int:
    """Return how many tokens up to `position` equal those up to `end`. Counting ends with the last grade."""
    limit = min(GRADE_MATCHES[-1], position + 1)
    n_equal = 0
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
