"""Requeues the jobs of worker processes that have died, so that the jobs do not wait until their leases expire.

A supervisor requeues the jobs of its own worker. If the supervisor was killed too, the next worker that starts on the
same machine requeues them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import Worker
from llamaq.common.redis.connect import connect
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.process.process_identity import is_dead_here
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0


def release_in_background(settings: WorkerSettings, worker_id: str) -> threading.Thread:
    """Release the jobs of a dead worker on a new thread, so that the supervisor can restart the worker meanwhile.

    Args:
        settings: The settings of the worker.
        worker_id: The id of the worker. Its process has ended.
    """
    return _start(settings, partial(_release, worker_id=worker_id))


def release_dead_neighbours(settings: WorkerSettings) -> threading.Thread:
    """Release the jobs of the queue's workers that have died on this machine, on a new thread.

    A worker calls this before it loads its model, because the card of a dead worker is stored for a few seconds only.
    """
    return _start(settings, _release_neighbours)


Release = Callable[[WorkerQueue], Awaitable[None]]


def _start(settings: WorkerSettings, release: Release) -> threading.Thread:
    thread = threading.Thread(target=_run, args=(settings, release), name="llamaq-release", daemon=True)
    thread.start()
    return thread


def _run(settings: WorkerSettings, release: Release) -> None:
    try:
        asyncio.run(_connect_and_release(settings, release))
    except (RedisError, OSError, LlamaqError) as exc:
        reason = str(exc) or f"no reply within {RELEASE_TIMEOUT_S:g} s"
        log.warning("dead_worker.release_failed error=%s: jobs of dead workers wait for their leases", reason)


async def _connect_and_release(settings: WorkerSettings, release: Release) -> None:
    redis = connect(settings.redis_url, name="llamaq-release", failover_s=0)
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await release(WorkerQueue(redis, Keys(settings.key_prefix), settings.queue, settings.partitions))
    finally:
        await redis.aclose()


async def _release_neighbours(queue: WorkerQueue) -> None:
    """Release the jobs of all workers in the list of workers whose processes have died on this machine."""
    members: Any = await queue.redis.zrange(queue.keys.workers(queue.name), 0, -1)
    for worker_id in [member.decode(errors="replace") for member in members]:
        card: Any = await queue.redis.hget(queue.keys.worker(worker_id), "worker")
        with suppress(ProtocolError):  # a worker of another version, or a damaged card
            if card is not None and is_dead_here(codec.decode_model(Worker, card).card):
                await _release(queue, worker_id)


async def _release(queue: WorkerQueue, worker_id: str) -> None:
    """Requeue the jobs of the worker in all partitions that answer, and remove the worker from the list of workers."""
    scripts = UpkeepScripts(queue)
    results = await asyncio.gather(
        *(scripts.release_worker(partition, worker_id) for partition in queue.partitions),
        _unregister(queue, worker_id),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    n_released = sum(result for result in results if isinstance(result, int))
    log.info("dead_worker.released worker=%s jobs=%d", worker_id, n_released)


async def _unregister(queue: WorkerQueue, worker_id: str) -> None:
    await queue.redis.zrem(queue.keys.workers(queue.name), worker_id)
    await queue.redis.delete(queue.keys.worker(worker_id))
