"""Drafts from the job's own text (prompt lookup): the tokens that followed an earlier occurrence of the last tokens.

Edited code, extracted facts and answers that quote their prompt repeat long parts of it. The occurrences are found as
in LZ77 compression: a dict has the last position of each n-gram, and each position has the previous position of the
same n-gram. So a new token takes the same short time in texts of any length.

There are two more sources of drafts, for texts without such an occurrence:

- An edit. An edited text differs from its original for a few tokens and then follows it again. An n-gram of the
  original is complete only after several tokens. So the place in the original is kept, and right after the edit the
  draft is the text of the original at this place.
- A rare token, which may begin a quotation. If the last token has occurred exactly once before, the draft is the text
  after that occurrence.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from llamaq.worker.core.draft import NO_DRAFT, Draft

N_GRAM = 3
"""Number of last tokens that must have occurred before."""
MAX_OCCURRENCES = 4
"""Number of earlier occurrences of the last n-gram, newest first, that are compared."""
RARE, AFTER_EDIT, NGRAM = 0, 1, 2
"""Grades of drafts: after a rare token, after an edit, and after an n-gram."""
GRADE_MATCHES = (4, 8, 16)
"""A draft after an n-gram has the grade `NGRAM`, plus 1 for each of these numbers of equal tokens that it reaches. More
equal tokens than the last number are not counted."""
OFTEN = -sys.maxsize
"""Stands in `_places` for a token that occurs more than twice."""
MAX_EDIT = 8
"""Longest edit: upper bound on the tokens that it removes, and on the tokens that it adds. After a longer edit, the
original is forgotten."""


class NgramDrafter:
    """Finds the longest earlier occurrence of the end of the history. Implements `core.draft.Drafter`.

    Args:
        history: The prompt, and the tokens that earlier attempts generated.
    """

    def __init__(self, history: Sequence[int]) -> None:
        self._last: dict[int, int] = {}
        """Maps an n-gram, packed into one integer, to the last position at which it ends."""
        self._before: array[int] = array("i")
        """For each position, the previous position at which the same n-gram ends. -1: there is none."""
        self._places: dict[int, int] = {}
        """Maps a token that occurs once to its position, a token that occurs twice to `~position` of its first
        occurrence, and any other token to `OFTEN`."""
        self._distance = 0
        """Number of tokens from the source of the last draft to the end of the history. 0: no source is known."""
        self._found: tuple[int, int, int] = (-1, -1, RARE)
        """The last position of the history in the last call of `propose`, and the result of `_find` for it."""
        self._read(history)

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        """Return the tokens after the best source; see `Drafter.propose`.

        The best source is the n-gram occurrence with the most tokens in common with the end of the history; the newest
        if several have equally many. Without an occurrence, it is the original after an edit, otherwise a rare token.
        """
        end = len(history) - 1
        if end != self._found[0]:  # equal: the last batch was refused, so the same draft is proposed again
            self._read(history)
            self._found = (end, *self._find(history, end))
        _, source, grade = self._found
        return NO_DRAFT if source < 0 else Draft(_following(history, source, n_max), grade)

    def _find(self, history: Sequence[int], end: int) -> tuple[int, int]:
        """Return the position that the draft follows, or -1 if there is no draft, and the grade of the draft."""
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
        """Return where the best occurrence ends, -1 if there is none, and the number of equal tokens."""
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
        """Return the position in the original that corresponds to the last token of the history. -1: it is not known.

        The last token may be the first token after the edit. Then its position is the nearest one at which the original
        has the same token. If there is no such position and only the last token differs, this token has probably
        replaced one token of the original.
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
        """Record the tokens that the history has in addition to the last call, and the n-grams that end with them."""
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
    """Return how many tokens up to `position` equal those up to `end`, at most the last number of `GRADE_MATCHES`."""
    limit = min(GRADE_MATCHES[-1], position + 1)
    n_equal = N_GRAM
    while n_equal < limit and history[position - n_equal] == history[end - n_equal]:
        n_equal += 1
    return n_equal


def _following(history: Sequence[int], position: int, n_tokens: int) -> tuple[int, ...]:
    """Return the `n_tokens` tokens after `position`. If the history has fewer, these are repeated."""
    following = tuple(history[position + 1 : position + 1 + n_tokens])
    period = len(history) - 1 - position
    if len(following) < n_tokens:
        following = (following * (n_tokens // period + 1))[:n_tokens]
    return following
