"""How long a tick will take, guessed from those that were."""

from __future__ import annotations

import pytest

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Slot
from llamaq.worker.engine_loop.tick_times import IDLE_S, TickTimes


def prefill(n_tokens: int) -> Batch:
    return Batch(prefill=(PrefillChunk(Slot(0), n_tokens),))


DECODE = Batch(decode=(DecodeToken(Slot(0)),))


def test_a_tick_is_as_long_as_the_last_one() -> None:
    times = TickTimes()
    assert times.guess(0) == IDLE_S
    times.saw(DECODE, 0.04)
    assert times.guess(0) == 0.04
    times.saw(Batch(), 0.0)
    assert times.guess(0) == IDLE_S


def test_a_tick_that_reads_a_prompt_is_longer() -> None:
    times = TickTimes()
    times.saw(prefill(500), 0.5)
    times.saw(DECODE, 0.01)
    assert times.guess(200) == pytest.approx(0.2)
    assert times.guess(1) == 0.01


def test_a_few_prompt_tokens_say_nothing_of_many() -> None:
    times = TickTimes()
    times.saw(prefill(2), 0.5)
    times.saw(DECODE, 0.01)
    assert times.guess(1000) == 0.01


def test_one_slow_tick_does_not_change_all() -> None:
    times = TickTimes()
    for seconds in (0.1, 1.0):
        times.saw(prefill(100), seconds)
    times.saw(DECODE, 0.01)
    assert times.guess(100) == pytest.approx(0.325)
