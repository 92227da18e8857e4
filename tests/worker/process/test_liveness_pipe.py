"""What a supervisor concludes from the beats of its child."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from llamaq.worker.process import liveness_pipe as beats_module
from llamaq.worker.process.liveness_pipe import MAX_STEP_S, SLACK_S, WRITE_EVERY_S, LivenessReader, LivenessWriter

HANG_AFTER_S = 10.0


class Ticks:
    """A tick loop that ticks when it is told to, and counts who looks at it."""

    def __init__(self) -> None:
        self.hang_after_s = HANG_AFTER_S
        self.n_looks = 0
        self._tick_started_s = 0.0

    @property
    def tick_started_s(self) -> float:
        self.n_looks += 1
        return self._tick_started_s

    def tick(self) -> None:
        self._tick_started_s += 1


@dataclass
class Watch:
    """A supervisor's end of a pipe, and a clock that stands still."""

    pulse: LivenessReader
    ours: int
    now_s: float = 0.0

    def says(self, line: str) -> None:
        os.write(self.ours, line.encode())

    def pass_time(self, seconds: float) -> bool:
        """Look every tenth of a second for so long; whether the child was found well all the time."""
        looks = []
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            looks.append(self.pulse.poll())
        return all(looks)


@pytest.fixture
def watch() -> Iterator[Watch]:
    theirs, ours = os.pipe()
    watch = Watch(None, ours)  # type: ignore[arg-type]  # its clock is the watch's
    watch.pulse = LivenessReader(theirs, lambda: watch.now_s)
    yield watch
    watch.pulse.close()
    os.close(ours)


def test_a_child_that_has_never_ticked_may_load_its_model_for_any_time(watch: Watch) -> None:
    assert watch.pass_time(1000)


def test_a_silence_longer_than_a_tick_may_take_is_a_hang(watch: Watch) -> None:
    watch.says(f"{HANG_AFTER_S}\n")
    assert watch.pass_time(HANG_AFTER_S + SLACK_S - 0.5)
    watch.says(f"{HANG_AFTER_S}\n")
    assert watch.pass_time(HANG_AFTER_S + SLACK_S - 0.5)
    assert not watch.pass_time(1)


def test_a_child_says_itself_how_long_its_ticks_may_take(watch: Watch) -> None:
    watch.says("10\n400\n")
    assert watch.pass_time(390)
    watch.says("10\n")
    assert not watch.pass_time(20)


def test_half_a_line_is_no_beat(watch: Watch) -> None:
    watch.says("10\n")
    assert watch.pass_time(5)
    watch.says("99")
    assert not watch.pass_time(10)
    watch.says("9\n")
    assert watch.pass_time(900)


def test_a_child_that_has_stopped_to_tick_on_purpose_may_take_its_leave(watch: Watch) -> None:
    watch.says("10\n10\nend\n")
    assert watch.pass_time(1000)


def test_a_supervisor_that_slept_does_not_blame_its_child(watch: Watch) -> None:
    watch.says("10\n")
    assert watch.pass_time(1)
    watch.now_s += 3600
    assert watch.pulse.poll()
    assert watch.pulse.silent_s < 1 + MAX_STEP_S + 0.2


def test_a_child_beats_once_for_each_new_stamp_and_says_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WRITE_EVERY_S < SLACK_S / 2
    monkeypatch.setattr(beats_module, "WRITE_EVERY_S", 0.001)
    theirs, ours = os.pipe()
    ticks = Ticks()
    with os.fdopen(theirs, "rb") as read:
        with LivenessWriter(ours, ticks):
            assert read.readline() == b"10.000\n", "the first tick may be the one that hangs"
            for hang_after_s in (10.0, 60.0):
                ticks.hang_after_s = hang_after_s
                ticks.tick()
                assert read.readline() == f"{hang_after_s:.3f}\n".encode()
            n_looks = ticks.n_looks
            while ticks.n_looks < n_looks + 10:
                time.sleep(0.001)
        os.close(ours)
        assert read.read() == b"end\n", "no beat without a new stamp"


def test_a_pipe_that_nobody_reads_or_that_is_gone_stops_nothing() -> None:
    theirs, ours = os.pipe()
    ticks = Ticks()
    os.set_blocking(ours, False)
    with suppress(BlockingIOError):
        while True:
            os.write(ours, b"10\n" * 1000)
    with LivenessWriter(ours, ticks):
        ticks.tick()
    os.close(theirs)
    with LivenessWriter(ours, ticks):
        ticks.tick()
    os.close(ours)
