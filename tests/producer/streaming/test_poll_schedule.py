"""Silent jobs are polled seldom, and jobs that sent tokens soon."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.producer.streaming.poll_schedule import (
    JITTER,
    LONGEST_SILENCE_S,
    SILENCE_S,
    WAITING_SILENCE_S,
    PollSchedule,
)


class SilentListener:
    """The attributes of a listener that the schedule reads."""

    def __init__(self, *, is_receiving: bool) -> None:
        self.is_receiving = is_receiving
        self.heard_s = 0.0
        self.is_closed = False


def poll_times(schedule: PollSchedule, until_s: float, start_s: float = 0.0) -> list[float]:
    """Return the times at which the schedule wants a poll, if it is asked ten times a second."""
    times = [start_s + number / 10 for number in range(int((until_s - start_s) * 10))]
    return [now_s for now_s in times for _ in schedule.pop_due(now_s)]


@pytest.mark.parametrize(("is_receiving", "first_s"), [(True, SILENCE_S), (False, WAITING_SILENCE_S)])
def test_the_pause_between_two_polls_doubles_up_to_its_limit(is_receiving: bool, first_s: float) -> None:
    listener: Any = SilentListener(is_receiving=is_receiving)
    schedule = PollSchedule()
    schedule.add(listener, 0.0)
    times = poll_times(schedule, 600)
    pauses = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    for number, pause_s in enumerate(pauses):
        expected_s = min(first_s * 2**number, LONGEST_SILENCE_S)
        assert expected_s <= pause_s + 1e-6
        assert pause_s <= expected_s * (1 + JITTER) + 0.2


def test_a_message_begins_the_short_pauses_again() -> None:
    listener: Any = SilentListener(is_receiving=True)
    schedule = PollSchedule()
    schedule.add(listener, 0.0)
    poll_times(schedule, 200)
    listener.heard_s = 200.0
    first_s = poll_times(schedule, 300, 200.0)[:2]
    assert first_s[0] <= 200 + LONGEST_SILENCE_S * (1 + JITTER) + 0.2
    assert first_s[1] - first_s[0] <= 2 * SILENCE_S * (1 + JITTER) + 0.2


def test_a_listener_that_hears_messages_all_the_time_is_never_polled() -> None:
    listener: Any = SilentListener(is_receiving=True)
    schedule = PollSchedule()
    schedule.add(listener, 0.0)
    for number in range(1, 1000):
        listener.heard_s = number / 10
        assert schedule.pop_due(number / 10) == []


def test_a_closed_listener_is_forgotten() -> None:
    listener: Any = SilentListener(is_receiving=True)
    schedule = PollSchedule()
    schedule.add(listener, 0.0)
    listener.is_closed = True
    assert poll_times(schedule, 100) == []
    assert repr(schedule) == "<PollSchedule 0 planned>"


def test_ten_thousand_silent_jobs_are_polled_at_different_times() -> None:
    schedule = PollSchedule()
    listeners: Any = [SilentListener(is_receiving=False) for _ in range(10_000)]
    for listener in listeners:
        schedule.add(listener, 0.0)
    per_check = [len(schedule.pop_due(number / 2)) for number in range(600)]
    assert sum(per_check[120:]) / 240 < 340  # polls per second, after the first minute
    assert max(per_check[300:]) < 1_000
