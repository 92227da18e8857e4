from __future__ import annotations

import pytest

from llamaq.worker.scheduling.tokens_ahead.ahead_times import (
    LONGEST,
    N_OF_CLASS,
    AheadTimes,
    MeasuredAheadTimes,
    class_of,
)
from llamaq.worker.scheduling.tokens_ahead.draft_lengths import DraftOption, choose_lengths

FORGOTTEN_AFTER = 100


def measured(*ticks: tuple[int, float]) -> AheadTimes:
    """Return the times after ticks, each with a number of draft tokens and the seconds of one of them."""
    times = MeasuredAheadTimes(FORGOTTEN_AFTER)
    for tick, (n_tokens, token_s) in enumerate(ticks, start=1):
        times.record(tick, n_tokens, token_s)
    read = times.read(len(ticks))
    assert read is not None
    return read


def test_every_number_of_draft_tokens_has_a_class() -> None:
    for place, longest in enumerate(LONGEST):
        shortest = LONGEST[place - 1] + 1 if place else 1
        assert {class_of(n_tokens) for n_tokens in range(shortest, longest + 1)} == {place}
    assert class_of(10_000) == len(LONGEST) - 1


def test_short_and_long_drafts_have_times_of_their_own() -> None:
    times = measured((1, 0.1), (16, 0.5))
    assert times.seconds(1) == pytest.approx(0.1)
    assert times.seconds(15) == pytest.approx(7.5)
    assert (times.least_token_s, times.largest_token_s) == (0.1, 0.5)


def test_a_number_that_was_not_measured_has_the_time_of_the_nearest_one() -> None:
    times = measured((1, 0.1), (16, 0.5))
    assert [times.seconds(n_tokens) / n_tokens for n_tokens in (2, 4, 8, 12, 64)] == pytest.approx(
        [0.1, 0.1, 0.5, 0.5, 0.5]
    )
    assert measured((1, 0.1), (3, 0.3)).seconds(2) == pytest.approx(0.2), "equally near: the shorter one"


def test_of_many_ticks_the_median_counts_and_of_few_the_shortest() -> None:
    assert measured((4, 0.9), (4, 0.2)).seconds(4) == pytest.approx(0.8)
    assert measured((4, 0.9), (4, 0.2), (4, 0.3)).seconds(4) == pytest.approx(1.2)
    assert measured((1, 0.5), (4, 0.9), (4, 0.3)).seconds(4) == pytest.approx(2.4), "three ticks are many"
    assert measured(*[(4, 9.0)] * N_OF_CLASS, *[(4, 0.3)] * N_OF_CLASS).seconds(4) == pytest.approx(1.2)
    assert measured((4, -0.1)).seconds(4) == 0.0, "noise does not make a token take less than no time"


def test_ticks_are_forgotten() -> None:
    times = MeasuredAheadTimes(FORGOTTEN_AFTER)
    assert times.read(0) is None
    times.record(1, 1, 0.1)
    times.record(50, 16, 0.5)
    assert times.read(100) == measured((1, 0.1), (16, 0.5))
    assert times.read(101) == AheadTimes.constant(0.5)
    assert times.read(149) == AheadTimes.constant(0.5)
    assert times.read(150) is None


def test_drafts_are_short_where_the_first_draft_tokens_cost_the_least() -> None:
    """The times of a CPU with which one token takes 1.1 ms, four take 2.1 and sixteen 9."""
    times = measured((1, 0.13), (3, 0.34), (8, 0.45), (15, 0.53))
    assert choose_lengths([DraftOption(16, 0.95)], 1, 1.1, times, 64) == [2]
    assert choose_lengths([DraftOption(16, 0.3)], 1, 1.1, AheadTimes.constant(0.34), 64) == [0]
    times = measured((1, 0.05), (2, 0.34), (8, 0.45), (15, 0.53))
    assert choose_lengths([DraftOption(16, 0.3)], 1, 1.1, times, 64) == [1]


def test_drafts_are_long_where_only_the_first_draft_token_costs_time() -> None:
    """The times of a GPU: verifying any number of tokens takes as long."""
    times = measured((1, 0.4), (2, 0.2), (4, 0.1), (8, 0.05), (16, 0.025))
    assert choose_lengths([DraftOption(16, 0.9)], 1, 1.0, times, 64) == [16]
    assert choose_lengths([DraftOption(1, 0.6)], 1, 1.0, times, 64) == [0], "a single token promises too little"
