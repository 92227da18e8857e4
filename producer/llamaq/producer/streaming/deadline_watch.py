"""Ends awaited jobs at their deadlines, and moves awaited delayed jobs into their queue when they are due.

So this also happens without a worker.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.protocol.script_types import ExpireCode
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer.streaming.job_listener import JobListener

log = logging.getLogger(__name__)

LATE_S = 0.1
"""How long after a deadline a client tries to end the job. A worker of the queue ends it at the deadline."""
RETRY_S = 1.0
"""Delay before the next try, if a job that is due by our clock could not be ended."""


class DeadlineWatch:
    """Keeps the times at which the jobs that this client waits for become due or reach a deadline.

    `check` is called regularly.

    At a deadline the job is read again, because it may have started: then its `queue_timeout_s` no longer matters.
    """

    def __init__(
        self, redis: Redis, expire: Callable[[str], Awaitable[ExpireCode]], read_again: Callable[[JobListener], None]
    ) -> None:
        """Create a watch.

        Args:
            redis: Connections to Redis.
            expire: Ends a job at its deadline, or adds a delayed job to its job stream when the job is due. Returns
                which of the two it did: `ended` or `given`, otherwise `none`.
            read_again: Lets the state of a job be read soon, and passed to `update`.
        """
        self._redis = redis
        self._expire = expire
        self._read_again = read_again
        self._planned: list[tuple[float, int, JobListener]] = []
        """Listeners by the event-loop time at which `check` reads their jobs again."""
        self._numbers = itertools.count()
        self._unplanned: list[tuple[JobListener, int]] = []
        """Listeners and deadlines that were read while the clock of Redis was unknown."""
        self._server_ahead_s: float | None = None
        """The clock of Redis minus that of the event loop. None: not measured."""
        self._measuring: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<DeadlineWatch {len(self._planned)} planned>"

    def update(self, listener: JobListener, due_ms: int | None) -> None:
        """Take the deadline of a listener's job, as it was read just now. None: the job has no deadline."""
        known_ms, listener.due_ms = listener.due_ms, due_ms
        if due_ms is None or listener.is_closed:
            return
        if self._server_ahead_s is None:
            self._unplanned.append((listener, due_ms))
            return
        now_s = asyncio.get_running_loop().time()
        check_s = due_ms / 1000 - self._server_ahead_s + LATE_S
        if check_s <= now_s:
            self._tasks.start(self._end(listener.job_id))
            check_s = now_s + RETRY_S
        elif due_ms == known_ms:
            return
        heapq.heappush(self._planned, (check_s, next(self._numbers), listener))

    def check(self) -> None:
        """Request a new read of each job whose deadline has passed."""
        if self._unplanned and self._measuring is None:
            self._measuring = self._tasks.start(self._measure_clock())
        now_s = asyncio.get_running_loop().time()
        while self._planned and self._planned[0][0] <= now_s:
            _, _, listener = heapq.heappop(self._planned)
            if not listener.is_closed and listener.due_ms is not None:
                self._read_again(listener)

    async def aclose(self) -> None:
        """Cancel all commands."""
        await self._tasks.cancel()

    async def _measure_clock(self) -> None:
        try:
            server_ms = await server_time_ms(self._redis)
        except (RedisError, OSError) as exc:
            log.debug("client.no_server_time error=%s", exc)  # `check` tries again
            return
        finally:
            self._measuring = None
        self._server_ahead_s = server_ms / 1000 - asyncio.get_running_loop().time()
        unplanned, self._unplanned = self._unplanned, []
        for listener, due_ms in unplanned:
            listener.due_ms = None
            self.update(listener, due_ms)

    async def _end(self, job_id: str) -> None:
        try:
            if (code := await self._expire(job_id)) != "none":
                log.debug("job.expired id=%s code=%s", job_id, code)
            else:
                self._server_ahead_s = None  # perhaps the clock of Redis has moved
        except (RedisError, OSError) as exc:
            log.warning("job.expire_failed id=%s error=%s", job_id, exc)
