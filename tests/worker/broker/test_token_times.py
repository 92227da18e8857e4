"""The times of a job's tokens: one time between two tokens for each token after the first, over all attempts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.common.metrics.buckets import SHORT_TIMES_MS
from llamaq.worker.broker.token_times import TokenTimes


def times_of(*times_ms: int) -> TokenTimes:
    times = TokenTimes()
    for time_ms in times_ms:
        times.add(time_ms)
    return times


def test_each_token_after_the_first_has_a_time_in_the_bucket_of_its_upper_bound() -> None:
    times = times_of(100, 110, 121, 121, 30_000)
    assert (times.first_ms, times.last_ms) == (100, 30_000)
    assert times.counts == {"10": 1, "20": 1, "1": 1, "inf": 1}


@given(st.lists(st.integers(0, 10**6), max_size=30), st.integers(0, 30))
def test_another_worker_that_continues_the_times_counts_the_same(deltas: list[int], n_first: int) -> None:
    total, times_ms = 0, []
    for delta in deltas:
        total += delta
        times_ms.append(total)
    continued = TokenTimes.decode(times_of(*times_ms[:n_first]).encode())
    for time_ms in times_ms[n_first:]:
        continued.add(time_ms)
    assert continued == times_of(*times_ms)
    assert sum(continued.counts.values()) == max(0, len(times_ms) - 1)
    largest = [b - a for a, b in pairwise(times_ms) if b - a > SHORT_TIMES_MS[-1]]
    assert continued.counts.get("inf", 0) == len(largest)


@pytest.mark.parametrize("text", ["", "1", "a b", "1 2 x", "1 2 10=x", "1 2 10=3=4", "\0"])
def test_a_damaged_text_counts_as_empty(text: str) -> None:
    assert TokenTimes.decode(text) == TokenTimes()


def test_a_bucket_of_another_version_is_left_out() -> None:
    assert TokenTimes.decode("1 9 4=2 5=1").counts == {"5": 1}
