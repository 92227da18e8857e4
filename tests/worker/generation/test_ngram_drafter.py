from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from llamaq.worker.core.token_draft import NO_DRAFT
from llamaq.worker.generation.ngram_drafter import GRADE_MATCHES, MAX_OCCURRENCES, N_GRAM, NgramDrafter

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
        assert draft == NO_DRAFT
        return
    found = [min(lengths[at], GRADE_MATCHES[-1]) for at in occurrences]
    source = occurrences[found.index(max(found))]
    assert draft.grade == sum(max(found) >= least for least in GRADE_MATCHES)
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
        assert grown.propose(text[:n], 4) == NgramDrafter(text[:n]).propose(text[:n], 4)


def test_a_repeated_text_is_drafted_with_the_highest_grade_and_a_new_one_not_at_all() -> None:
    text = list(range(1000, 1100))
    drafter = NgramDrafter(text)
    assert drafter.propose(text, 8) == NO_DRAFT
    draft = drafter.propose([*text, 7, *text[:30]], 8)
    assert (draft.tokens, draft.grade) == (tuple(text[30:38]), len(GRADE_MATCHES))
    assert draft.first(3).tokens == tuple(text[30:33])
