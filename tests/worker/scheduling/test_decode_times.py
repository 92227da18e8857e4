from __future__ import annotations

import pytest

from llamaq.worker.scheduling.decode_times import FORGOTTEN_AFTER, N_TICKS, UNKNOWN_TOKEN_COST, DecodeTimes


def test_the_time_of_a_size_is_the_median_of_its_newest_ticks() -> None:
    times = DecodeTimes()
    assert times.seconds(3) == 0
    for seconds in (0.5, 0.010, 0.011, 0.9, 0.012, 0.010):
        times.record(4, seconds)
    assert times.seconds(4) == pytest.approx(0.011)
    for _ in range(N_TICKS):
        times.record(4, 0.020)
    assert times.seconds(4) == pytest.approx(0.020), "older ticks count no more"


def test_other_sizes_are_estimated_from_the_measured_ones() -> None:
    times = DecodeTimes()
    times.record(2, 0.010)
    assert times.seconds(1) == pytest.approx(0.010)
    assert times.seconds(12) == pytest.approx(0.010 * (1 + 10 * UNKNOWN_TOKEN_COST))
    times.record(10, 0.030)
    assert times.seconds(6) == pytest.approx(0.020)
    assert times.seconds(14) == pytest.approx(0.040)
    times.record(10, 0.002)
    times.record(10, 0.002)
    assert times.seconds(20) == pytest.approx(0.002), "a larger tick is not predicted to be shorter"


def test_a_size_that_was_not_measured_for_long_is_forgotten() -> None:
    times = DecodeTimes()
    times.record(8, 9.0)
    for _ in range(FORGOTTEN_AFTER):
        times.record(1, 0.010)
    assert times.seconds(8) == pytest.approx(0.010 * (1 + 7 * UNKNOWN_TOKEN_COST))
