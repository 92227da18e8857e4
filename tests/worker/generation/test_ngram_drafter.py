from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.worker.core.draft import NO_DRAFT, Draft
from llamaq.worker.generation.ngram_drafter import (
    AFTER_EDIT,
    GRADE_MATCHES,
    MAX_EDIT,
    MAX_OCCURRENCES,
    N_GRAM,
    NGRAM,
    RARE,
    NgramDrafter,
)

texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def common_end(history: Sequence[int], position: int) -> int:
    """Return how many tokens up to `position` equal the last tokens of the history."""
    pairs = zip(history[position::-1], history[::-1], strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), position + 1)


@given(text=texts, n_max=st.integers(1, 20), n_prompt=st.integers(0, 80))
def test_a_draft_is_what_followed_the_longest_of_the_newest_occurrences(
    text: list[int], n_max: int, n_prompt: int
) -> None:
    drafter = NgramDrafter(text[:n_prompt])
    draft = drafter.propose(text, n_max)
    lengths = {at: common_end(text, at) for at in range(len(text) - 1)}
    occurrences = [at for at, length in lengths.items() if length >= N_GRAM][::-1][:MAX_OCCURRENCES]
    if not occurrences:
        assert draft.grade == RARE
        return
    found = [min(lengths[at], GRADE_MATCHES[-1]) for at in occurrences]
    source = occurrences[found.index(max(found))]
    assert draft.grade == NGRAM + sum(max(found) >= least for least in GRADE_MATCHES)
    assert len(draft) == n_max
    extended = [*text]
    for token in draft.tokens:  # past the end, the draft continues with its own tokens
        source += 1
        assert token == extended[source]
        extended.append(token)


@given(text=texts)
def test_tokens_that_arrive_one_by_one_are_found_like_those_of_the_prompt(text: list[int]) -> None:
    grown = NgramDrafter([])
    for n in range(1, len(text) + 1):
        draft = grown.propose(text[:n], 4)
        assert draft.grade == AFTER_EDIT or draft == NgramDrafter(text[:n]).propose(text[:n], 4)
        assert grown.propose(text[:n], 4) == draft, "the plan asks again after a search"


ORIGINAL = list(range(100, 160))


def drafts_after(edited: Sequence[int], n_tokens: int) -> list[Draft]:
    """Return the drafts after each of the last `n_tokens` tokens of a text that repeats `ORIGINAL` with an edit."""
    drafter = NgramDrafter(ORIGINAL)
    return [drafter.propose([*ORIGINAL, *edited[: len(edited) - n_left]], 4) for n_left in range(n_tokens, -1, -1)][1:]


@pytest.mark.parametrize("n_removed", range(MAX_EDIT + 1))
@pytest.mark.parametrize("n_added", range(MAX_EDIT + 1))
def test_after_an_edit_the_draft_follows_the_original_again(n_removed: int, n_added: int) -> None:
    first = 20 + n_removed  # the first token of the original after the edit
    edited = [*ORIGINAL[:20], *range(n_added), ORIGINAL[first]]
    *during, after = drafts_after(edited, n_added + 1)
    assert after.tokens == tuple(ORIGINAL[first + 1 : first + 5])
    assert after.grade == (AFTER_EDIT if n_removed or n_added else NGRAM + len(GRADE_MATCHES))
    if n_added:
        assert during[0] == Draft(tuple(ORIGINAL[21:25]), AFTER_EDIT), "one token has probably replaced one"
        assert during[1:] == [NO_DRAFT] * (n_added - 1)


def test_an_original_is_given_up_after_a_long_edit() -> None:
    added = range(MAX_EDIT + 1)
    *_, after = drafts_after([*ORIGINAL[:20], *added, ORIGINAL[21]], len(added) + 1)
    assert after.grade == RARE


def test_a_token_that_occurred_once_before_is_followed_by_what_followed_it_there() -> None:
    text = [*ORIGINAL, 7, 7]
    assert NgramDrafter(text).propose([*text, ORIGINAL[30]], 4) == Draft(tuple(ORIGINAL[31:35]), RARE)
    assert NgramDrafter(text).propose([*text, 8], 4) == NO_DRAFT
    assert NgramDrafter(text).propose([*text, 9, 7], 4) == NO_DRAFT, "it occurred twice"


def test_a_repeated_text_is_drafted_with_the_highest_grade_and_a_new_one_not_at_all() -> None:
    text = list(range(1000, 1100))
    drafter = NgramDrafter(text)
    assert drafter.propose(text, 8) == NO_DRAFT
    draft = drafter.propose([*text, 7, *text[:30]], 8)
    assert (draft.tokens, draft.grade) == (tuple(text[30:38]), NGRAM + len(GRADE_MATCHES))
    assert draft.first(3).tokens == tuple(text[30:33])
