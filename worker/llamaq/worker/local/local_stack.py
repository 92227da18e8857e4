"""Redis and workers in one go: what `llamaq up` keeps running and `llamaq demo` runs for a minute."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

DEFAULT_PORT = 6379


@contextmanager
def redis_for(url: str | None, *, port: int | None, data_dir: Path | None = None) -> Iterator[str]:
    """The URL of a Redis: the one that is named, or an embedded one for as long as the context lasts."""
    if url is not None:
        yield url
        return
    with EmbeddedRedis(port=port, data_dir=data_dir) as redis:
        yield redis.url


@contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that no process is left behind."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT as a list that fills, to be looked at from time to time.

    For an event loop: an exception in the middle of its own work breaks it, and asyncio's own way, a cancellation, is
    one that redis-py may swallow.
    """
    noted: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(settings: WorkerSettings) -> int:
    """Run the workers until a signal comes; returns the exit code."""
    return Supervisor.of_devices(settings).run()
