"""Leases that look expired after an outage of Redis or a jump of its clock are not trusted."""

from __future__ import annotations

from llamaq.worker.broker.lease_guard import LeaseGuard
from llamaq.worker.testing import ManualClock

LEASE_S = 9.0


def observe_every_second(guard: LeaseGuard, clock: ManualClock, seconds: int, server_ms: int) -> int:
    """Let the server answer every second, and return its last time."""
    for _ in range(seconds):
        clock.now_s += 1
        server_ms += 1000
        guard.observe(server_ms)
    return server_ms


def test_leases_are_trusted_while_the_server_answers_and_its_clock_runs() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    assert guard.trusted_until_ms() == 0, "the server has not answered"
    guard.observe(1_000_000)
    assert guard.trusted_until_ms() == 1_003_000
    observe_every_second(guard, clock, 20, 1_000_000)
    assert guard.trusted_until_ms() == 1_023_000
    clock.now_s += 2
    assert guard.trusted_until_ms() == 1_025_000


def test_after_an_outage_leases_are_trusted_when_the_time_of_a_lease_has_passed() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    guard.observe(1_000_000)
    clock.now_s += 3.5
    assert guard.trusted_until_ms() == 0, "the outage lasts"
    guard.observe(1_003_500)
    assert guard.trusted_until_ms() == 0
    server_ms = observe_every_second(guard, clock, 8, 1_003_500)
    assert guard.trusted_until_ms() == 0
    observe_every_second(guard, clock, 1, server_ms)
    assert guard.trusted_until_ms() > 0


def test_a_clock_that_jumps_forward_is_not_trusted_before_and_after_the_jump_is_seen() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    guard.observe(1_000_000)
    clock.now_s += 0.25
    assert guard.trusted_until_ms() < 1_060_000, "the script that takes entries compares its own time"
    guard.observe(1_060_000)
    assert guard.trusted_until_ms() == 0
    observe_every_second(guard, clock, 9, 1_060_000)
    assert guard.trusted_until_ms() > 0


def test_a_clock_that_jumps_back_makes_leases_longer_and_is_trusted() -> None:
    clock = ManualClock()
    guard = LeaseGuard(LEASE_S, clock)
    guard.observe(1_000_000)
    clock.now_s += 0.25
    guard.observe(940_000)
    assert guard.trusted_until_ms() == 943_000
