"""Leases that look expired after an outage of Redis or a jump of its clock are not trusted."""

from __future__ import annotations

import pytest

from llamaq.worker.broker.lease_guard import LeaseGuard
from llamaq.worker.testing import ManualClock

LEASE_S = 9.0


def observe_often(guard: LeaseGuard, clock: ManualClock, seconds: float, server_ms: int) -> int:
    """Let the server answer four times a second, and return its last time."""
    for _ in range(int(seconds * 4)):
        clock.now_s += 0.25
        server_ms += 250
        guard.observe(server_ms, 0.0)
    return server_ms


def test_leases_are_trusted_while_the_server_answers_and_its_clock_runs() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    assert guard.trusted_until_ms() == 0, "the server has not answered"
    guard.observe(1_000_000, 0.0)
    assert guard.trusted_until_ms() == 1_000_750
    observe_often(guard, clock, 20, 1_000_000)
    assert guard.trusted_until_ms() == 1_020_750
    clock.now_s += 0.5
    assert guard.trusted_until_ms() == 1_021_250


@pytest.mark.parametrize(
    ("pause_s", "waited_s", "distrust_s"),
    [
        pytest.param(3.5, 3.25, LEASE_S, id="outage"),
        pytest.param(3.5, 2.75, 1.0, id="short outage"),
        pytest.param(8.0, 0.01, 1.0, id="the worker stood still"),
        pytest.param(9.5, 0.01, LEASE_S, id="the worker stood still for a lease"),
    ],
)
def test_after_a_pause_leases_are_not_trusted_for_a_time(pause_s: float, waited_s: float, distrust_s: float) -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    guard.observe(1_000_000, 0.0)
    clock.now_s += pause_s
    assert guard.trusted_until_ms() == 0, "the pause lasts"
    server_ms = 1_000_000 + int(pause_s * 1000)
    guard.observe(server_ms, waited_s)
    server_ms = observe_often(guard, clock, distrust_s - 0.25, server_ms)
    assert guard.trusted_until_ms() == 0
    observe_often(guard, clock, 0.25, server_ms)
    assert guard.trusted_until_ms() > 0


def test_a_clock_that_jumps_forward_is_not_trusted_before_and_after_the_jump_is_seen() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    guard.observe(1_000_000, 0.0)
    clock.now_s += 0.25
    assert guard.trusted_until_ms() < 1_060_000, "the script that takes entries compares its own time"
    guard.observe(1_060_000, 0.0)
    assert guard.trusted_until_ms() == 0
    observe_often(guard, clock, LEASE_S, 1_060_000)
    assert guard.trusted_until_ms() > 0


def test_a_clock_that_jumps_back_makes_leases_longer_and_is_trusted() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    guard.observe(1_000_000, 0.0)
    clock.now_s += 0.25
    guard.observe(940_000, 0.0)
    assert guard.trusted_until_ms() == 940_750
