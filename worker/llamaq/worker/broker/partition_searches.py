"""Searches the partitions of a queue for jobs that are due, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from redis.exceptions import RedisError

log = logging.getLogger(__name__)


async def search_partitions(
    partitions: Iterable[int], search: Callable[[int], Awaitable[int]], *, every_s: float, full: int
) -> None:
    """Search until cancelled. A partition that does not answer delays no other partition.

    Args:
        partitions: The partitions.
        search: Handles the due jobs of one partition, and returns their number. It may raise `RedisError`.
        every_s: Time between two searches of a partition, in seconds.
        full: Number of jobs of a search after which the next one follows at once, because more jobs may be due.
    """
    async with asyncio.TaskGroup() as tasks:
        for partition in partitions:
            tasks.create_task(_search_partition(partition, search, every_s, full))


async def _search_partition(partition: int, search: Callable[[int], Awaitable[int]], every_s: float, full: int) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            while await search(partition) >= full:
                pass
        except RedisError as exc:  # the other services of the worker log an outage
            log.debug("partition.search_failed search=%s partition=%d error=%s", search.__qualname__, partition, exc)
