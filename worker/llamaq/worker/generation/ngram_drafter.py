"""Drafts from the job's own text (prompt lookup): what followed the last tokens when they occurred before.

Edited code, extracted facts and answers that quote their prompt repeat long parts of it. The occurrences are found as
in LZ77 compression: a dict has the last position of each n-gram, and each position has the one before it with the
same n-gram. So a new token takes the same short time in texts of any length.

An edited text leaves its original for a few tokens and then follows it again. The n-gram after an edit would be found
only when several tokens of the original have followed. So the place in the original is kept, and after the first
different token the draft is what follows the replaced one. A quotation may begin with a rare token. If the last token
has occurred only once before, the draft is what followed it there.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from llamaq.worker.core.token_draft import NO_DRAFT, Draft

N_GRAM = 3
"""Number of last tokens that must have occurred before."""
MAX_OCCURRENCES = 4
"""Number of newest occurrences that are compared."""
RARE, AFTER_EDIT, NGRAM = 0, 1, 2
"""Grades of drafts: after a rare token, after an edit, and after an n-gram."""
GRADE_MATCHES = (4, 8, 16)
"""The grade of a draft after an n-gram is higher by one, two or three if at least this many tokens before it are equal.
Comparing ends with the last number."""
OFTEN = -sys.maxsize
MAX_EDIT = 8
"""The longest edit: tokens that it removes, and tokens that it adds. After a longer one, the original is given up."""


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
        self._places: dict[int, int] = {}
        """Maps a token that occurs once to its position, one that occurs twice to `~position` of the first of them, and
        any other one to `OFTEN`."""
        self._distance = 0
        """How far back the original of the last draft is. 0: there was no draft, or its original was given up."""
        self._found: tuple[int, int, int] = (-1, -1, RARE)
        """The end of the history in the last call of `propose`, the source that was found, and the grade."""
        self._read(history)

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        """Return what followed the best occurrence, or the original after an edit; see `Drafter.propose`.

        The best occurrence has the longest part in common with the end of the history. Of several, it is the newest.
        """
        end = len(history) - 1
        if end != self._found[0]:  # after a search, the plan asks once more
            self._read(history)
            self._found = (end, *self._find(history, end))
        _, source, grade = self._found
        return NO_DRAFT if source < 0 else Draft(_following(history, source, n_max), grade)

    def _find(self, history: Sequence[int], end: int) -> tuple[int, int]:
        """Return after which position the draft is, -1 if there is none, and its grade."""
        source, n_equal = self._best_occurrence(history, end)
        grade = NGRAM + sum(n_equal >= least for least in GRADE_MATCHES)
        if source < 0 and self._distance:
            source, grade = self._after_edit(history, end), AFTER_EDIT
        if source < 0:
            source, grade = self._only_occurrence(history), RARE
        if source >= 0:
            self._distance = end - source
        return source, grade

    def _best_occurrence(self, history: Sequence[int], end: int) -> tuple[int, int]:
        """Return where the best occurrence ends, -1 if there is none, and how many tokens are equal."""
        best, n_best, position = -1, 0, self._before[end] if end >= 0 else -1
        for _ in range(MAX_OCCURRENCES):
            if position < 0 or n_best == GRADE_MATCHES[-1]:
                break
            n_equal = _count_equal(history, position, end)
            if n_equal > n_best:
                best, n_best = position, n_equal
            position = self._before[position]
        return best, n_best

    def _only_occurrence(self, history: Sequence[int]) -> int:
        """Return the only earlier position of the last token. -1: there is none, or there are several."""
        place = self._places[history[-1]] if history else 0
        return ~place if OFTEN < place < 0 else -1

    def _after_edit(self, history: Sequence[int], end: int) -> int:
        """Return the place in the original that corresponds to the end of the history. -1: it is not known.

        The last token may be the first one after the edit. Then its place is the nearest at which the original has the
        same token. Otherwise, if only this token is different, it has probably replaced one.
        """
        expected = end - self._distance
        n_different = 0
        while history[end - n_different] != history[expected - n_different]:
            n_different += 1
            if n_different > min(MAX_EDIT + 1, expected):
                self._distance = 0
                return -1
        if not n_different:
            return expected
        first, last = max(0, expected - n_different), min(end - 1, expected + MAX_EDIT)
        places = [place for place in range(first, last + 1) if history[place] == history[end]]
        return min(places, key=lambda place: abs(place - expected), default=expected if n_different == 1 else -1)

    def _read(self, history: Sequence[int]) -> None:
        """Add the n-grams that end with a new token."""
        last, before, places = self._last, self._before, self._places
        for position in range(len(before), len(history)):
            place = places.get(history[position])
            places[history[position]] = position if place is None else ~place if place >= 0 else OFTEN
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
