"""How commands that run for a long time react to SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, so that all context managers end their processes."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGTERM and SIGINT are appended. The caller polls the list.

    Use this with an event loop. An exception from a signal handler could break the loop at any point, and redis-py may
    suppress the cancellation that asyncio uses for Ctrl-C.
    """
    numbers: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        numbers.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield numbers
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
