"""Redis and workers on one machine, started together: for `llamaq up` and `llamaq demo`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

DEFAULT_PORT = 6379


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


def supervise(
    settings: WorkerSettings, redis: EmbeddedRedis | None = None, *, also_check: Callable[[], None] = lambda: None
) -> int:
    """Run a worker for each device until SIGTERM or SIGINT, and return the exit code.

    Args:
        settings: The settings of the workers.
        redis: The server that these workers use. It is restarted when it crashes. None: a server of the user.
        also_check: Called with each check of the workers, to restart other processes.

    Raises:
        EmbeddedRedisError: `redis` has crashed and cannot be restarted. The workers are stopped.
    """
    if redis is None:
        return Supervisor.of_devices(settings, also_check=also_check).run()

    def check() -> None:
        redis.check()
        also_check()

    return Supervisor.of_devices(settings.model_copy(update={"redis_url": redis.url}), also_check=check).run()
