"""Supervises the workers of this machine, and the embedded Redis if it is used: for `llamaq up` and `llamaq worker`."""

from __future__ import annotations

from collections.abc import Callable

from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

DEFAULT_PORT = 6379


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
