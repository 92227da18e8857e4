"""Notices that no worker serves a queue while calls wait for its jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import NoWorker
from llamaq.common.protocol.keys import Keys

log = logging.getLogger(__name__)

SEARCH_EVERY_S = 30.0
"""Interval at which the watch searches for a worker while calls wait."""
FRESH_S = 5.0
"""A new call starts a search at once, unless the last search was less than this time ago."""


@dataclass(slots=True)
class _Queue:
    waiting: list[Callable[[NoWorker], None]] = field(default_factory=list)
    """For each waiting call, the function that ends it."""
    searched_s: float = float("-inf")
    has_worker: bool | None = None
    """The result of the last search. None: there was no search so far."""
    search_now: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class WorkerWatch:
    """Searches for workers in the background, so that calls do not wait for the search.

    A queue without a worker is logged once, until a worker was seen again.
    """

    def __init__(self, redis: Redis, keys: Keys, *, require_worker: bool) -> None:
        """Create a watch. With `require_worker`, calls that wait for a queue without a worker fail."""
        self._redis = redis
        self._keys = keys
        self._require_worker = require_worker
        self._queues: dict[str, _Queue] = {}

    def __repr__(self) -> str:
        return f"<WorkerWatch { ({name: queue.has_worker for name, queue in self._queues.items()}) }>"

    @contextmanager
    def waiting(self, queue: str, fail: Callable[[NoWorker], None]) -> Iterator[None]:
        """Watch the queue until the context exits.

        Args:
            queue: Name of the queue.
            fail: Ends the waiting call with an error. It is called only with `require_worker`.
        """
        state = self._queues.setdefault(queue, _Queue())
        state.waiting.append(fail)
        if state.task is None:
            state.task = asyncio.create_task(self._search_regularly(queue, state))
        elif asyncio.get_running_loop().time() - state.searched_s > FRESH_S:
            state.search_now.set()
        elif state.has_worker is False and self._require_worker:
            fail(NoWorker(queue))
        try:
            yield
        finally:
            state.waiting.remove(fail)

    async def require(self, queue: str) -> None:
        """Search for a worker, if this client requires one.

        Raises:
            NoWorker: No worker serves the queue.
        """
        if self._require_worker and not await self.search(queue):
            raise NoWorker(queue)

    async def search(self, queue: str) -> bool:
        """Search for a worker of the queue, and return whether there is one."""
        found = await has_worker(self._redis, self._keys, queue)
        state = self._queues.setdefault(queue, _Queue())
        state.searched_s = asyncio.get_running_loop().time()
        if not found and state.has_worker is not False:
            log.warning(
                "client.no_worker queue=%s: no worker serves this queue. Its jobs wait until one starts: "
                "llamaq worker --queue %s",
                queue,
                queue,
            )
        state.has_worker = found
        return found

    async def aclose(self) -> None:
        """End all searches."""
        await cancel_tasks(*(state.task for state in self._queues.values() if state.task is not None))
        self._queues.clear()

    async def _search_regularly(self, queue: str, state: _Queue) -> None:
        try:
            while state.waiting:
                state.search_now.clear()
                try:
                    if not await self.search(queue) and self._require_worker:
                        for fail in list(state.waiting):
                            fail(NoWorker(queue))
                except (RedisError, OSError) as exc:
                    log.debug("client.worker_search_failed queue=%s error=%s", queue, exc)
                try:
                    async with asyncio.timeout(SEARCH_EVERY_S):
                        await state.search_now.wait()
                except TimeoutError:
                    pass
        finally:
            state.task = None


async def has_worker(redis: Redis, keys: Keys, queue: str) -> bool:
    """Return whether a worker of the queue has a heartbeat that has not expired."""
    members: Any = await redis.zrange(keys.workers(queue), 0, -1)
    if not members:
        return False
    async with redis.pipeline(transaction=False) as pipe:
        for member in members:
            pipe.exists(keys.worker(member.decode(errors="replace")))
        return any(await pipe.execute())
