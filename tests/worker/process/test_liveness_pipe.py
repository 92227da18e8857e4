"""A supervisor notices a hang of its child's engine by the silence of the liveness pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from llamaq.worker.process import liveness_pipe
from llamaq.worker.process.liveness_pipe import MAX_STEP_S, SLACK_S, WRITE_EVERY_S, LivenessReader, LivenessWriter

HANG_AFTER_S = 10.0


class FakeTicks:
    """A tick loop that ticks when the test calls `tick`. It counts how often the writer reads `alive_s`."""

    def __init__(self) -> None:
        self.hang_after_s = HANG_AFTER_S
        self.n_reads = 0
        self._alive_s = 0.0

    @property
    def alive_s(self) -> float:
        self.n_reads += 1
        return self._alive_s

    def tick(self) -> None:
        self._alive_s += 1


@dataclass
class Pipe:
    """A pipe with the reader of the supervisor. The test sets the clock of the reader."""

    reader: LivenessReader
    write_fd: int
    now_s: float = 0.0

    def write(self, text: str) -> None:
        os.write(self.write_fd, text.encode())

    def is_alive_for(self, seconds: float) -> bool:
        """Poll every 0.1 s for this many seconds. Return whether every poll found the child alive."""
        results = []
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            results.append(self.reader.poll())
        return all(results)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read_fd, write_fd = os.pipe()
    pipe = Pipe(None, write_fd)  # type: ignore[arg-type]  # the reader needs the pipe's clock
    pipe.reader = LivenessReader(read_fd, lambda: pipe.now_s)
    yield pipe
    pipe.reader.close()
    os.close(write_fd)


def test_a_child_may_load_its_model_for_any_length_of_time_before_its_first_tick(pipe: Pipe) -> None:
    assert pipe.is_alive_for(1000)


def test_a_silence_longer_than_the_longest_tick_is_a_hang(pipe: Pipe) -> None:
    pipe.write(f"{HANG_AFTER_S}\n")
    assert pipe.is_alive_for(HANG_AFTER_S + SLACK_S - 0.5)
    pipe.write(f"{HANG_AFTER_S}\n")
    assert pipe.is_alive_for(HANG_AFTER_S + SLACK_S - 0.5)
    assert not pipe.is_alive_for(1)


def test_the_last_line_sets_how_long_a_tick_may_take(pipe: Pipe) -> None:
    pipe.write("10\n400\n")
    assert pipe.is_alive_for(390)
    pipe.write("10\n")
    assert not pipe.is_alive_for(20)


def test_an_incomplete_line_does_not_count_as_a_line(pipe: Pipe) -> None:
    pipe.write("10\n")
    assert pipe.is_alive_for(5)
    pipe.write("99")
    assert not pipe.is_alive_for(10)
    pipe.write("9\n")
    assert pipe.is_alive_for(900)


def test_after_the_last_tick_a_child_may_take_any_time_to_end(pipe: Pipe) -> None:
    pipe.write("10\n10\nend\n")
    assert pipe.is_alive_for(1000)


def test_time_in_which_the_supervisor_slept_is_not_silence_of_the_child(pipe: Pipe) -> None:
    pipe.write("10\n")
    assert pipe.is_alive_for(1)
    pipe.now_s += 3600
    assert pipe.reader.poll()
    assert pipe.reader.silent_s < 1 + MAX_STEP_S + 0.2


def test_a_child_writes_one_line_for_each_new_tick_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WRITE_EVERY_S < SLACK_S / 2
    monkeypatch.setattr(liveness_pipe, "WRITE_EVERY_S", 0.001)
    read_fd, write_fd = os.pipe()
    ticks = FakeTicks()
    with os.fdopen(read_fd, "rb") as lines:
        with LivenessWriter(write_fd, ticks):
            assert lines.readline() == b"10.000\n", "the first tick may hang"
            for hang_after_s in (10.0, 60.0):
                ticks.hang_after_s = hang_after_s
                ticks.tick()
                assert lines.readline() == f"{hang_after_s:.3f}\n".encode()
            n_reads = ticks.n_reads
            while ticks.n_reads < n_reads + 10:
                time.sleep(0.001)
        os.close(write_fd)
        assert lines.read() == b"end\n", "no line without a new tick"


def test_a_full_pipe_and_a_closed_pipe_do_not_block_the_child() -> None:
    read_fd, write_fd = os.pipe()
    ticks = FakeTicks()
    os.set_blocking(write_fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_fd, b"10\n" * 1000)
    with LivenessWriter(write_fd, ticks):
        ticks.tick()
    os.close(read_fd)
    with LivenessWriter(write_fd, ticks):
        ticks.tick()
    os.close(write_fd)
