"""The liveness pipe, through which a supervisor notices that its child's engine hangs.

The child regularly checks for a new tick, and writes a line if one has begun. The line contains the number of seconds
after which a tick counts as a hang. The pipe works without Redis, and a child whose interpreter hangs writes no line.
The first line is written when the model is loaded, because loading may take any time. The line `end` follows the last
tick.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

WRITE_EVERY_S = 0.5
"""How often the child checks for a new tick."""
SLACK_S = 2.0
"""Added to the time after which a tick counts as a hang, because a busy machine may delay a line."""
MAX_STEP_S = 1.0
"""Upper bound on the silence that is counted between two polls. If the time between two polls is longer, the machine
may have been suspended, and the child with it."""
READ_BYTES = 65536
END_LINE = b"end"


class TickClock(Protocol):
    """The properties of `EngineLiveness` that the liveness writer reads."""

    @property
    def alive_s(self) -> float:
        """When the engine thread last showed that it runs, in seconds. The clock may start at any value."""

    @property
    def hang_after_s(self) -> float:
        """After how many seconds a tick counts as a hang."""


class LivenessWriter:
    """The child's end of the pipe. A context manager: inside it, a separate thread writes the lines."""

    def __init__(self, fd: int, engine: TickClock) -> None:
        """Create the writer.

        Args:
            fd: The write end of the pipe.
            engine: Tells when the engine thread last showed that it runs.
        """
        os.set_blocking(fd, False)  # a supervisor that does not read the pipe must not block this process
        self._fd = fd
        self._engine = engine
        self._alive_s = engine.alive_s
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamaq-liveness", daemon=True)

    def __enter__(self) -> None:
        self._write_liveness()  # before the first tick, because it may hang
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        self._write(END_LINE)

    def _run(self) -> None:
        while not self._has_ended.wait(WRITE_EVERY_S):
            alive_s = self._engine.alive_s
            if alive_s != self._alive_s:
                self._alive_s = alive_s
                self._write_liveness()

    def _write_liveness(self) -> None:
        self._write(f"{self._engine.hang_after_s:.3f}".encode())

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # the pipe is full, or its read end is closed
            os.write(self._fd, line + b"\n")


class LivenessReader:
    """The supervisor's end of the pipe."""

    def __init__(self, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the reader.

        Args:
            fd: The read end of the pipe.
            clock: A clock in seconds.
        """
        os.set_blocking(fd, False)
        self._fd = fd
        self._clock = clock
        self._polled_s = clock()
        self._partial_line = b""
        self._hang_after_s: float | None = None
        """Seconds of silence that count as a hang. None: the child runs no ticks, so it cannot hang."""
        self.silent_s = 0.0
        """Seconds since the last line. Between two polls, at most `MAX_STEP_S` is counted."""

    def poll(self) -> bool:
        """Read the lines of the child. Returns False if its engine hangs. Call it at least every `MAX_STEP_S`."""
        now_s = self._clock()
        self.silent_s += min(now_s - self._polled_s, MAX_STEP_S)
        self._polled_s = now_s
        with suppress(BlockingIOError):
            *lines, self._partial_line = (self._partial_line + os.read(self._fd, READ_BYTES)).split(b"\n")
            if lines:
                self.silent_s = 0.0
                self._hang_after_s = None if lines[-1] == END_LINE else float(lines[-1])
        return self._hang_after_s is None or self.silent_s <= self._hang_after_s + SLACK_S

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._fd)
