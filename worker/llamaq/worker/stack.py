"""Redis and workers in one go: what `llamaq up` keeps running and `llamaq demo` runs for a minute."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llamaq.worker.embedded import EmbeddedRedis
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.supervisor import Supervisor

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


def supervise(settings: WorkerSettings) -> int:
    """Run the workers until a signal comes; returns the exit code."""
    return Supervisor.of_devices(settings).run()
