from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.worker.scheduling.tokens_ahead.ahead_times import AheadTimes
from llamaq.worker.scheduling.tokens_ahead.draft_lengths import LEAST_GAIN, DraftOption, can_gain, choose_lengths

candidates = st.lists(st.builds(DraftOption, st.integers(1, 4), st.floats(0.0, 1.0)), min_size=1, max_size=3)


def rate(drafts: list[DraftOption], lengths: tuple[int, ...], n_decode: int, token_s: float) -> float:
    """Return the expected tokens per second, if a tick without drafts takes a second."""
    pairs = zip(drafts, lengths, strict=True)
    expected = n_decode + sum(draft.probability**place for draft, length in pairs for place in range(1, length + 1))
    return expected / (1 + token_s * sum(lengths))


@given(drafts=candidates, n_more=st.integers(0, 4), token_s=st.floats(0.0, 2.0), room=st.integers(0, 12))
def test_no_other_lengths_promise_more_tokens_per_second(
    drafts: list[DraftOption], n_more: int, token_s: float, room: int
) -> None:
    n_decode = len(drafts) + n_more
    chosen = tuple(choose_lengths(drafts, n_decode, 1.0, AheadTimes.constant(token_s), room))
    assert sum(chosen) <= room
    assert all(0 <= length <= draft.n_tokens for draft, length in zip(drafts, chosen, strict=True))
    possible = product(*(range(draft.n_tokens + 1) for draft in drafts))
    best = max(rate(drafts, lengths, n_decode, token_s) for lengths in possible if sum(lengths) <= room)
    assert rate(drafts, chosen, n_decode, token_s) >= best / LEAST_GAIN * (1 - 1e-9)
    if sum(chosen):
        assert can_gain(n_decode, 1.0, token_s)


@given(drafts=candidates, n_more=st.integers(0, 4), token_s=st.floats(0.0, 1.0), step_s=st.floats(1e-6, 1.0))
def test_the_steps_of_a_draft_model_count(
    drafts: list[DraftOption], n_more: int, token_s: float, step_s: float
) -> None:
    n_decode = len(drafts) + n_more
    chosen = tuple(choose_lengths(drafts, n_decode, 1.0, AheadTimes.constant(token_s), 12, step_s))

    def rate_with_steps(lengths: tuple[int, ...]) -> float:
        seconds = 1 + token_s * sum(lengths)
        return rate(drafts, lengths, n_decode, token_s) * seconds / (seconds + step_s * max(lengths))

    possible = product(*(range(draft.n_tokens + 1) for draft in drafts))
    best = max(map(rate_with_steps, possible))
    assert rate_with_steps(chosen) >= best / LEAST_GAIN * (1 - 1e-9)
    if sum(chosen):
        assert rate_with_steps(chosen) >= LEAST_GAIN * n_decode * (1 - 1e-9)
        probability = max(draft.probability for draft in drafts)
        assert can_gain(n_decode, 1.0, token_s, step_s, probability * (1 + 1e-9))


def test_drafts_grow_with_their_acceptance_and_end_where_tokens_cost_more_than_they_yield() -> None:
    lengths = [
        choose_lengths([DraftOption(16, p)], 1, 1.0, AheadTimes.constant(0.4), 64)[0]
        for p in (0.1, 0.3, 0.5, 0.7, 0.9, 0.999)
    ]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[1], lengths[-1]) == (0, 0, 16)
    assert choose_lengths([DraftOption(16, 0.3)], 1, 1.0, AheadTimes.constant(0.001), 64)[0] > 0, (
        "on a GPU further tokens cost little"
    )


def test_the_more_reliable_drafts_get_the_room() -> None:
    drafts = [DraftOption(8, 0.5), DraftOption(8, 0.95)]
    assert choose_lengths(drafts, 2, 1.0, AheadTimes.constant(0.01), 6) == [0, 6]


def test_many_streams_leave_drafts_no_gain_on_a_machine_that_computes_each_token_in_the_same_time() -> None:
    drafts = [DraftOption(8, 0.9)] * 32
    assert sum(choose_lengths(drafts[:1], 1, 1.0, AheadTimes.constant(0.4), 64)) > 0
    assert sum(choose_lengths(drafts, 32, 13.4, AheadTimes.constant(0.42), 64)) == 0
    assert can_gain(1, 1.0, 0.4)
    assert not can_gain(32, 13.4, 0.42)


@pytest.mark.parametrize("room", [-3, 0])
def test_without_room_nothing_is_drafted(room: int) -> None:
    assert choose_lengths([DraftOption(8, 0.9)], 1, 1.0, AheadTimes.constant(0.01), room) == [0]
