"""Delays between attempts double up to a limit, and a reset starts again with the first delay."""

from __future__ import annotations

from llamaq.common.backoff import Backoff


def test_delays_double_up_to_the_limit() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_delay_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_reset_the_first_delay_is_returned_again() -> None:
    backoff = Backoff(0.5, 3.0)
    for _ in range(3):
        backoff.next_delay_s()
    backoff.reset()
    assert backoff.next_delay_s() == 0.5


def test_thousands_of_failures_do_not_overflow_the_delay() -> None:
    backoff = Backoff(0.05, 2.0)
    assert {backoff.next_delay_s() for _ in range(5000)} >= {0.05, 2.0}
    assert backoff.next_delay_s() == 2.0


def test_a_limit_below_the_first_delay_limits_the_first_delay() -> None:
    assert Backoff(0.05, 0.03).next_delay_s() == 0.03
