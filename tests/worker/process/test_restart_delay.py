from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamaq.worker.process import restart_delay
from llamaq.worker.process.restart_delay import FIRST_DELAY_S, STEADY_S, RestartDelay


def test_the_delay_doubles_with_each_restart_up_to_its_bound() -> None:
    delay = RestartDelay(0.5)
    assert [delay.begin(STEADY_S) for _ in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.5])


def test_after_a_long_life_the_delay_is_short_again() -> None:
    delay = RestartDelay(30)
    for _ in range(5):
        delay.begin()
    assert delay.begin(STEADY_S + 1) == FIRST_DELAY_S


def test_a_delay_is_over_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(restart_delay, "time", SimpleNamespace(monotonic=lambda: now_s))
    delay = RestartDelay(30)
    delay_s = delay.begin()
    now_s += 0.9 * delay_s
    assert not delay.is_over
    now_s += 0.2 * delay_s
    assert delay.is_over
