"""Whether the engine thread hangs, with a manual clock."""

from __future__ import annotations

from llamaq.worker.engine_loop.engine_liveness import SLOW_TICKS, EngineLiveness
from llamaq.worker.testing import ManualClock

HANG_S = 60.0


def run_tick(liveness: EngineLiveness, clock: ManualClock, duration_s: float) -> None:
    liveness.show_alive()
    clock.now_s += duration_s
    liveness.end_tick()


def test_a_machine_with_slow_ticks_is_given_more_time() -> None:
    clock = ManualClock()
    liveness = EngineLiveness(HANG_S, clock)
    run_tick(liveness, clock, 50)
    assert liveness.hang_after_s == SLOW_TICKS * 50


def test_a_pause_of_the_whole_process_does_not_end_the_search_for_hangs() -> None:
    clock = ManualClock()
    liveness = EngineLiveness(HANG_S, clock)
    run_tick(liveness, clock, 3600)
    for _ in range(100):
        run_tick(liveness, clock, 0.01)
    assert liveness.hang_after_s <= SLOW_TICKS * HANG_S
    clock.now_s += SLOW_TICKS * HANG_S
    assert not liveness.is_alive
