"""Finds the other live workers of a queue."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.protocol.script_source import source
from llamaq.worker.broker.worker_queue import WorkerQueue

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 3.0
"""How long Redis may take to return the list of workers."""
SILENT_LEASES = 2
"""A worker that has sent no heartbeat for this number of leases, and whose card has expired, is removed from the list.
Until then `CrashCheck` needs the time of its last heartbeat."""
SILENT_WORKER_S = 10.0
"""The shortest such time."""


class LiveWorkers:
    """The live workers of one queue, without this one. They are in a list that heartbeats keep up to date.

    On a cluster, the node with the list may not answer, while the partitions are on other nodes.
    """

    def __init__(self, queue: WorkerQueue, worker_id: str, lease_s: float) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._remove_silent = queue.redis.register_script(source("remove_silent", __package__))
        self._silent_s = max(SILENT_WORKER_S, SILENT_LEASES * lease_s)

    async def may_exist(self) -> bool:
        """Return whether there may be a live worker. If Redis does not answer, there may be one."""
        live = await self.find()
        return live is None or len(live) > 0

    async def find(self) -> list[str] | None:
        """Return the ids of the live workers. None: Redis does not answer. Removes workers that have ended."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._read()
        except (RedisError, TimeoutError) as exc:
            log.debug("queue.workers_unknown error=%s", exc)
            return None

    async def _read(self) -> list[str]:
        redis, keys = self._queue.redis, self._queue.keys
        key = keys.workers(self._queue.name)
        members: Any = await redis.zrange(key, 0, -1)
        if not members:
            return []
        async with redis.pipeline(transaction=False) as pipe:
            for worker in members:
                pipe.exists(keys.worker(worker.decode(errors="replace")))
            exists = await pipe.execute()
        ended = [worker for worker, is_alive in zip(members, exists, strict=True) if not is_alive]
        if ended:
            await self._remove_silent(keys=[key], args=[int(self._silent_s * 1000), *ended])
        alive = [worker.decode(errors="replace") for worker, is_alive in zip(members, exists, strict=True) if is_alive]
        return [worker for worker in alive if worker != self._worker_id]

    def __repr__(self) -> str:
        return f"<LiveWorkers of {self._queue!r} beside {self._worker_id}>"
