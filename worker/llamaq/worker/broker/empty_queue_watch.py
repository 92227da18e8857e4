"""Notices that a queue has no more work: for workers with `--exit-when-empty`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from llamaq.common.redis.server_state import server_time_ms
from llamaq.worker.broker.worker_queue import WorkerQueue

log = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 0.05, 1.0
"""Bounds of the time between two counts of the jobs."""


class EmptyQueueWatch:
    """Counts the jobs of a queue until the queue has been empty for some time.

    The jobs of all workers count: a job that another worker runs can be requeued, and then needs a worker.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self, queue: WorkerQueue, empty_s: float, *, on_empty: Callable[[], None]) -> None:
        """Create the watch.

        Args:
            queue: The queue to watch.
            empty_s: Seconds for which the queue must be empty.
            on_empty: Called once, when the queue has been empty for `empty_s` seconds.
        """
        self._queue = queue
        self._empty_s = empty_s
        self._on_empty = on_empty

    async def run(self) -> None:
        """Count until the queue has been empty for `empty_s` seconds, then call `on_empty`.

        If Redis does not answer, the queue may have jobs. After this, the time begins again.
        """
        now_s = asyncio.get_running_loop().time
        empty_since_s: float | None = None
        while empty_since_s is None or now_s() - empty_since_s < self._empty_s:
            await asyncio.sleep(min(MAX_POLL_S, max(self._empty_s / 4, MIN_POLL_S)))
            try:
                is_empty = await self.is_empty()
            except RedisError as exc:  # the other services of the worker log an outage
                log.debug("empty_queue.unknown error=%s", exc)
                is_empty = False
            if not is_empty:
                empty_since_s = None
            elif empty_since_s is None:
                empty_since_s = now_s()
        log.info("worker.queue_empty queue=%s empty_s=%g", self._queue.name, self._empty_s)
        self._on_empty()

    async def is_empty(self) -> bool:
        """Return whether no job waits or runs, and no delayed job is due within `empty_s`.

        Raises:
            RedisError: A partition did not answer.
        """
        queue = self._queue
        depth = await queue.depth()
        if depth.waiting or depth.running:
            return False
        if not depth.delayed:
            return True
        until_ms = await server_time_ms(queue.redis) + int(self._empty_s * 1000)
        keys = [queue.keys.later(queue.name, partition) for partition in queue.partitions]
        due = [await queue.redis.zcount(key, "-inf", until_ms) for key in keys]
        return not any(due)

    def __repr__(self) -> str:
        return f"<EmptyQueueWatch of {self._queue!r} empty_s={self._empty_s:g}>"
