from __future__ import annotations

import pytest

from llamaq.worker.scheduling.tokens_ahead.ahead_times import FEW, N_OF_CLASS
from llamaq.worker.scheduling.tokens_ahead.decode_times import FORGOTTEN_AFTER, N_PLAIN_TICKS, N_SETTLING, DecodeTimes


def test_the_time_of_a_tick_is_the_median_of_the_newest_ticks_with_as_many_streams() -> None:
    times = DecodeTimes()
    assert times.plain_s(4) is None
    for seconds in (0.5, 0.010, 0.011, 0.9, 0.012, 0.010):
        times.record(4, 0, seconds)
    assert times.plain_s(4) == pytest.approx(0.011)
    assert times.plain_s(5) is None
    for _ in range(N_PLAIN_TICKS):
        times.record(4, 0, 0.020)
    assert times.plain_s(4) == pytest.approx(0.020), "older ticks count no more"


def drafts_s(times: DecodeTimes, n_decode: int, n_ahead: int) -> float:
    """Return the predicted seconds of drafts."""
    known = times.ahead_times(n_decode)
    assert known is not None
    return known.seconds(n_ahead)


def test_the_time_of_draft_tokens_is_what_ticks_with_drafts_take_longer() -> None:
    times = DecodeTimes()
    times.record(2, 5, 0.030)
    assert times.ahead_times(2) is None, "the time without drafts is not known"
    times.record(2, 0, 0.010)
    times.record(2, 5, 0.020)
    assert drafts_s(times, 2, 5) == pytest.approx(0.010)
    assert times.n_ahead_ticks == 1
    for _ in range(N_OF_CLASS):
        times.record(2, 5, 0.008)
    assert drafts_s(times, 2, 5) == 0.0, "noise does not make a token take less than no time"


def test_few_measured_ticks_are_known_as_such() -> None:
    times = DecodeTimes()
    times.record(1, 0, 0.010)
    for n_measured in range(FEW + 1):
        assert not times.has_ahead_times(1), n_measured
        times.record(1, 4, 0.018)
    assert times.has_ahead_times(1)
    assert not times.has_ahead_times(2)


def test_measurements_are_forgotten() -> None:
    times = DecodeTimes()
    times.record(1, 0, 0.010)
    times.record(1, 4, 0.090)
    for _ in range(FORGOTTEN_AFTER):
        times.record(2, 0, 0.012)
    assert times.plain_s(1) is None
    assert times.ahead_times(1) is None
    assert times.plain_s(2) == pytest.approx(0.012)


def test_the_times_of_draft_tokens_are_those_of_ticks_with_as_many_decode_tokens() -> None:
    times = DecodeTimes()
    times.record(1, 0, 0.010)
    times.record(8, 0, 0.040)
    assert times.ahead_times(1) is None
    times.record(1, 2, 0.012)
    times.record(8, 2, 0.050)
    alone, together = times.ahead_times(1), times.ahead_times(8)
    assert alone is not None
    assert together is not None
    assert (alone.seconds(2), together.seconds(2)) == pytest.approx((0.002, 0.010))
    assert times.ahead_times(3) == together, "of the newest ticks"


def test_a_tick_after_draft_tokens_that_takes_longer_is_part_of_their_time() -> None:
    times = DecodeTimes()
    for _ in range(N_PLAIN_TICKS):
        times.record(2, 0, 0.010)
    times.record(2, 4, 0.018)
    assert drafts_s(times, 2, 4) == pytest.approx(0.008)
    for n_settled in range(N_SETTLING):
        times.record(2, 0, 0.012)
        assert drafts_s(times, 2, 4) == pytest.approx(0.010 + 0.002 * n_settled)
    assert times.plain_s(2) == pytest.approx(0.010)
    for _ in range(N_PLAIN_TICKS):
        times.record(2, 0, 0.013)
    assert times.plain_s(2) == pytest.approx(0.013), "these ticks are slower for another reason"
    assert drafts_s(times, 2, 4) == pytest.approx(0.012)


def test_a_tick_with_other_streams_says_nothing_about_the_draft_tokens_before_it() -> None:
    times = DecodeTimes()
    times.record(2, 0, 0.010)
    times.record(3, 0, 0.011)
    times.record(2, 4, 0.018)
    times.record(3, 0, 0.050)
    times.record(2, 0, 0.010)
    assert drafts_s(times, 2, 4) == pytest.approx(0.008)
    assert times.plain_s(3) == pytest.approx(0.0305)
