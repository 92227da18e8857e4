"""Reads several queues, although another client of Redis has overwritten keys of some of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from redis.exceptions import ResponseError

from llamaq.common.errors import ProtocolError
from llamaq.common.redis.write_refusals import is_job_key_error

log = logging.getLogger(__name__)

T = TypeVar("T")


class DamagedQueues:
    """The queues that could not be read because of the content of their keys. They must not hide the other queues."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<DamagedQueues {self.names}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the queues whose last read has failed, sorted."""
        return tuple(sorted(self._errors))

    async def read(self, queue: str, reading: Awaitable[T]) -> T | None:
        """Return what a read of a queue returns. None: a key of the queue has unexpected content.

        The error is logged when it is new.

        Args:
            queue: Name of the queue.
            reading: The read.

        Raises:
            RedisError: Redis did not answer, or refuses the commands.
        """
        try:
            found = await reading
        except (ResponseError, ProtocolError) as exc:
            if isinstance(exc, ResponseError) and not is_job_key_error(exc):
                raise
            error = str(exc)
            if self._errors.get(queue) != error:
                log.warning("queue.damaged queue=%s: another client has overwritten a key: %s", queue, error)
            self._errors[queue] = error
            return None
        self._errors.pop(queue, None)
        return found
