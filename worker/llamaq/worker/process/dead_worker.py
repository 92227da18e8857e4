"""Releases the jobs of a worker process that its supervisor saw die, so that they do not wait for their leases."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.upkeep_scripts import UpkeepScripts
from llamaq.common.redis.connect import connect
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0


def make_worker_id(pid: int, token: str) -> str:
    """Return the id of the worker in the process `pid` of this host. `token` differs when a `pid` is used again."""
    return f"{socket.gethostname()}-{pid}-{token}"


def release_in_background(settings: WorkerSettings, worker_id: str) -> threading.Thread:
    """Release the jobs of a dead worker on a new thread, so that the supervisor can restart the worker meanwhile.

    Args:
        settings: The settings of the worker.
        worker_id: The id of the worker. Its process has ended.
    """
    thread = threading.Thread(target=_release, args=(settings, worker_id), name="llamaq-release", daemon=True)
    thread.start()
    return thread


def _release(settings: WorkerSettings, worker_id: str) -> None:
    try:
        n_released = asyncio.run(_release_jobs(settings, worker_id))
    except (RedisError, TimeoutError, LlamaqError) as exc:
        log.warning("child.release_failed worker=%s error=%s: its jobs wait for their leases", worker_id, exc)
    else:
        log.info("child.released worker=%s jobs=%d", worker_id, n_released)


async def _release_jobs(settings: WorkerSettings, worker_id: str) -> int:
    """Requeue the jobs of the worker in all partitions that answer, and remove the worker from the list of workers."""
    redis = connect(settings.redis_url, name="llamaq-supervisor", failover_s=0)
    keys = Keys(settings.key_prefix)
    scripts = UpkeepScripts(redis, keys, settings.queue)
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            results = await asyncio.gather(
                *(scripts.release_worker(partition, worker_id) for partition in range(settings.partitions)),
                _unregister(redis, keys, settings.queue, worker_id),
                return_exceptions=True,
            )
    finally:
        await redis.aclose()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return sum(result for result in results if isinstance(result, int))


async def _unregister(redis: Redis, keys: Keys, queue: str, worker_id: str) -> None:
    await redis.zrem(keys.workers(queue), worker_id)
    await redis.delete(keys.worker(worker_id))
