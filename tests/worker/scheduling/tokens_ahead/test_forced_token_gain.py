"""Forced tokens are computed ahead only where this takes less time than to draw them one by one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from llamaq.worker.scheduling.tokens_ahead.decode_times import FORGOTTEN_AFTER
from llamaq.worker.scheduling.tokens_ahead.forced_token_gain import (
    LEAST_LOSS,
    N_LEAST,
    N_PLAIN,
    N_SETTLING,
    PLAIN_PERIOD,
    ForcedTokenGain,
)

Times = Callable[[int, int, bool], float]
"""Returns the milliseconds of a tick from its decode tokens, its forced tokens, and whether the last tick was alike."""


def gpu(n_decode: int, n_forced: int, is_alike: bool) -> float:
    """Return times of a GPU: those of 8 and of 32 jobs were measured."""
    reused, built, built_with_forced = (3.43, 4.83, 6.39) if n_decode <= 8 else (7.6, 10.74, 9.39)
    return built_with_forced if n_forced else reused if is_alike else built


def cpu(n_decode: int, n_forced: int, is_alike: bool) -> float:
    """Return times of a CPU, as measured for a small model."""
    return 2.0 + 0.57 * n_decode + 0.065 * n_forced + (0.0 if is_alike else 0.05)


class Device:
    """Records ticks whose times depend on their shapes."""

    def __init__(self, times: Times, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.gain = ForcedTokenGain()
        self.ms = 0.0
        self.times, self._noise = times, noise
        self._last: tuple[int, int] | None = None

    def tick(self, n_decode: int, n_forced: int = 0) -> None:
        shape = (n_decode, n_forced)
        ms = self.times(n_decode, n_forced, shape == self._last) * self._noise()
        self._last = shape
        self.ms += ms
        self.gain.record(n_decode, n_forced, ms / 1000)

    def measure(self, n_decode: int, n_forced: int, n_rounds: int = N_LEAST) -> Device:
        """Run ticks that measure all times for these numbers of tokens."""
        for _ in range(N_SETTLING + N_LEAST):
            self.tick(n_decode)
        for _ in range(n_rounds):
            self.tick(n_decode, n_forced)
            self.tick(n_decode)
        return self


def test_forced_tokens_that_cost_more_than_they_save_do_not_pay() -> None:
    assert not Device(gpu).measure(8, 4).gain.pays_off(8, 4)
    assert not Device(gpu).measure(32, 8).gain.pays_off(32, 8)
    assert Device(cpu).measure(8, 4).gain.pays_off(8, 4)
    assert Device(cpu).measure(32, 8).gain.pays_off(32, 8)


def test_the_time_of_the_next_tick_is_a_cost_too() -> None:
    def slow_after(n_decode: int, n_forced: int, is_alike: bool) -> float:
        return 10.0 if n_forced or is_alike else 40.0

    assert not Device(slow_after).measure(4, 4).gain.pays_off(4, 4)
    assert Device(lambda *_: 10.0).measure(4, 4).gain.pays_off(4, 4)


def test_many_forced_tokens_may_pay_where_few_do_not() -> None:
    device = Device(gpu).measure(8, 2)
    assert [device.gain.pays_off(8, n_forced) for n_forced in (1, 2, 3, 4, 6)] == [False] * 5
    assert device.gain.pays_off(8, 16), "they take at least as long as 2, so that only a tick can tell"
    device.measure(8, 16)
    assert device.gain.pays_off(8, 16)
    assert not device.gain.pays_off(8, 6), "a larger number tells nothing new about a smaller one"


def test_fewer_forced_tokens_take_at_most_as_long_for_each_as_many() -> None:
    device = Device(gpu).measure(8, 4)
    assert not device.gain.pays_off(8, 1)
    assert not device.gain.pays_off(8, 2)


@pytest.mark.parametrize(("excess", "pays"), [(0.95, True), (1.05, False)])
def test_the_costs_must_clearly_exceed_the_value(excess: float, pays: bool) -> None:
    def times(n_decode: int, n_forced: int, is_alike: bool) -> float:
        return 8.0 + excess * LEAST_LOSS * n_forced * 8.0 / n_decode

    assert Device(times).measure(8, 4).gain.pays_off(8, 4) is pays


def test_forced_tokens_pay_until_all_their_costs_are_measured_several_times() -> None:
    device = Device(gpu)
    assert device.gain.pays_off(8, 4)
    for _ in range(N_SETTLING + N_LEAST):
        device.tick(8)
    for _ in range(N_LEAST - 1):
        device.tick(8, 4)
        device.tick(8)
        assert device.gain.pays_off(8, 4)
    device.tick(8, 4)
    device.tick(8)
    assert not device.gain.pays_off(8, 4)


def test_forced_tokens_that_do_not_pay_are_tried_again_when_their_times_are_forgotten() -> None:
    device = Device(gpu).measure(8, 4)
    n_plain = 0
    while not device.gain.pays_off(8, 4):
        device.tick(8)
        n_plain += 1
    assert 0 <= FORGOTTEN_AFTER - n_plain < 2 * N_LEAST
    n_tried = 0
    for _ in range(FORGOTTEN_AFTER):
        pays = device.gain.pays_off(8, 4)
        n_tried += pays
        device.tick(8, 4 if pays else 0)
    assert n_tried == N_LEAST, "then they are known to cost as much as before"


def test_a_device_that_has_become_quick_gets_forced_tokens_again() -> None:
    device = Device(gpu).measure(8, 4)
    device.times = cpu
    pays = []
    for _ in range(2 * FORGOTTEN_AFTER):
        pays.append(device.gain.pays_off(8, 4))
        device.tick(8, 4 if pays[-1] else 0)
        device.tick(8)
    assert not any(pays[: FORGOTTEN_AFTER // 4])
    assert sum(pays[-FORGOTTEN_AFTER:]) > 0.95 * FORGOTTEN_AFTER, "a few ticks measure the time without them"


def test_the_time_without_forced_tokens_is_measured_also_if_each_tick_could_have_some() -> None:
    device = Device(gpu)
    pays = []
    for _ in range(PLAIN_PERIOD + N_PLAIN):
        pays.append(device.gain.pays_off(32, 8))
        device.tick(32, 8 if pays[-1] else 0)
    n_first = PLAIN_PERIOD - N_PLAIN
    assert all(pays[:n_first])
    assert pays[n_first:].index(True) == N_SETTLING + N_LEAST


def test_only_ticks_whose_graph_is_reused_tell_the_time_without_forced_tokens() -> None:
    device = Device(gpu)
    for _ in range(20):
        device.tick(8, 4)
        device.tick(8)
        device.tick(8)
    for _ in range(20):
        device.gain.record_other()
        device.tick(8)
        device.tick(8)
    for _ in range(20):
        device.tick(7)
        device.tick(8)
    assert "8 decode tokens 0.00 ms" in repr(device.gain)
    device.measure(8, 4)
    assert "8 decode tokens 3.43 ms" in repr(device.gain)
    assert "the tick after it 1.40 ms" in repr(device.gain)


def test_a_number_of_streams_that_was_not_measured_has_the_times_of_a_similar_one() -> None:
    device = Device(gpu).measure(32, 8)
    assert not device.gain.pays_off(31, 8)
    assert not device.gain.pays_off(29, 8)
    assert device.gain.pays_off(16, 8), "not known"


def chains(random: Random, n_slots: int) -> Callable[[bool], int]:
    """Return a function that makes a tick with or without the forced tokens, and returns their next number."""
    left = [0] * n_slots

    def advance(has_forced: bool) -> int:
        for slot in range(n_slots):
            if has_forced or not left[slot]:
                left[slot] = random.randint(1, 5) if random.random() < 0.1 else 0
            else:
                left[slot] -= 1
        return sum(left)

    return advance


@pytest.mark.parametrize("n_decode", [1, 4, 8, 32])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_on_a_cpu_nearly_all_forced_tokens_are_computed_ahead_also_under_load(n_decode: int, is_loaded: bool) -> None:
    random = Random(n_decode)

    def noise() -> float:
        return 1 + 0.1 * random.random() + (1.5 * random.random() if random.random() < 0.3 else 0)

    device = Device(cpu, noise if is_loaded else lambda: 1.0)
    advance, n_forced, n_all, n_refused = chains(random, n_decode), 0, 0, 0
    for _ in range(4000):
        pays = device.gain.pays_off(n_decode, n_forced) if n_forced else False
        n_all += n_forced
        n_refused += 0 if pays else n_forced
        device.tick(n_decode, n_forced if pays else 0)
        n_forced = advance(pays)
    assert n_refused < 0.1 * n_all


def test_on_a_gpu_most_forced_tokens_of_few_are_left_out() -> None:
    random = Random(1)
    device = Device(gpu, lambda: random.uniform(0.97, 1.06))
    advance, n_forced, n_ticks, n_forced_ticks, n_tokens = chains(random, 8), 0, 4000, 0, 0
    for _ in range(n_ticks):
        pays = n_forced > 0 and device.gain.pays_off(8, n_forced)
        n_tokens += 8 + (n_forced if pays else 0)
        n_forced_ticks += pays
        device.tick(8, n_forced if pays else 0)
        n_forced = advance(pays)
    assert n_forced_ticks < 0.15 * n_ticks, "where there are more than 8, they pay"
    assert n_tokens / device.ms > 0.93 * 8 / 3.43
