"""The predicted time of a tick follows from the times of earlier ticks."""

from __future__ import annotations

import pytest

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Slot
from llamaq.worker.engine_loop.tick_time_predictor import IDLE_TICK_S, TickTimePredictor


def prefill(n_tokens: int) -> Batch:
    return Batch(prefill=(PrefillChunk(Slot(0), n_tokens),))


DECODE = Batch(decode=(DecodeToken(Slot(0)),))


def test_a_tick_is_predicted_to_take_as_long_as_the_last_one() -> None:
    times = TickTimePredictor()
    assert times.predict_s(0) == IDLE_TICK_S
    times.record(DECODE, 0.04)
    assert times.predict_s(0) == 0.04
    times.record(Batch(), 0.0)
    assert times.predict_s(0) == IDLE_TICK_S


def test_a_tick_with_prompt_tokens_is_predicted_by_the_time_of_one_prompt_token() -> None:
    times = TickTimePredictor()
    times.record(prefill(500), 0.5)
    times.record(DECODE, 0.01)
    assert times.predict_s(200) == pytest.approx(0.2)
    assert times.predict_s(1) == 0.01


def test_a_tick_with_few_prompt_tokens_does_not_change_the_time_of_one_prompt_token() -> None:
    times = TickTimePredictor()
    times.record(prefill(2), 0.5)
    times.record(DECODE, 0.01)
    assert times.predict_s(1000) == 0.01


def test_one_slow_tick_changes_the_prediction_only_a_little() -> None:
    times = TickTimePredictor()
    for seconds in (0.1, 1.0):
        times.record(prefill(100), seconds)
    times.record(DECODE, 0.01)
    assert times.predict_s(100) == pytest.approx(0.325)
