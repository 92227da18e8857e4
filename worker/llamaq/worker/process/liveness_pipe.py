"""How a supervisor knows that its child's engine ticks: the child writes a line into a pipe after each new stamp.

A pipe, because it needs no Redis, and because a child whose interpreter is stuck is silent too. The line says how long
the next one may take. There are none before the first tick is due, for loading a model may take any time, and none
after the last one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

BEAT_EVERY_S = 0.5
SLACK_S = 2.0
"""For the way through the pipe on a busy machine, beyond what a tick may take."""
MAX_STEP_S = 1.0
"""A supervisor that was itself asleep counts no more than this: its child may have slept with it."""
READ_BYTES = 65536


class Ticker(Protocol):
    """What beats are about."""

    @property
    def stamp_s(self) -> float:
        """When the last tick began; any clock."""

    @property
    def patience_s(self) -> float:
        """How long a tick may take before it is a hang."""


class LivenessWriter:
    """The child's end: writes while the block lasts."""

    def __init__(self, fd: int, ticker: Ticker) -> None:
        os.set_blocking(fd, False)  # a supervisor that does not read must not stop anything here
        self._fd = fd
        self._ticker = ticker
        self._stamp_s = ticker.stamp_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamaq-beats", daemon=True)

    def __enter__(self) -> None:
        self._beat()  # at once: the very first tick may hang
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._write("end\n")

    def _run(self) -> None:
        while not self._is_over.wait(BEAT_EVERY_S):
            stamp_s = self._ticker.stamp_s
            if stamp_s != self._stamp_s:
                self._stamp_s = stamp_s
                self._beat()

    def _beat(self) -> None:
        self._write(f"{self._ticker.patience_s:.3f}\n")

    def _write(self, line: str) -> None:
        with suppress(OSError):  # the pipe is full, or nobody reads it any more
            os.write(self._fd, line.encode())


class LivenessReader:
    """The supervisor's end: to be looked at often."""

    def __init__(self, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._clock = clock
        self._looked_s = clock()
        self._rest = b""
        self._patience_s: float | None = None
        self.silent_s = 0.0
        """Since the last beat, as far as somebody was awake to hear one."""

    def look(self) -> bool:
        """Take in what was written; False when the engine hangs."""
        now = self._clock()
        self.silent_s += min(now - self._looked_s, MAX_STEP_S)
        self._looked_s = now
        with suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._fd, READ_BYTES)).split(b"\n")
            if lines:
                self.silent_s = 0.0
                self._patience_s = None if lines[-1] == b"end" else float(lines[-1])
        return self._patience_s is None or self.silent_s <= self._patience_s + SLACK_S

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._fd)
