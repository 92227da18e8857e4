"""Saying once that Redis takes nothing, however often it is tried."""

from __future__ import annotations

import logging

from redis.exceptions import RedisError

from llamaq.common.redis.redis_errors import is_full


class OutageLog:
    """One warning when Redis begins to refuse, or refuses for another reason, and one line when it is over.

    It is true while there is trouble.
    """

    def __init__(self, log: logging.Logger, who: str) -> None:
        self._log = log
        self._who = who
        self._kind: str | None = None

    def __bool__(self) -> bool:
        return self._kind is not None

    def __repr__(self) -> str:
        return f"<OutageLog of {self._who}: {self._kind or 'none'}>"

    def note(self, error: RedisError) -> None:
        """Redis, or the way to it, failed with this."""
        kind = "redis_full" if is_full(error) else "redis_error"
        if kind != self._kind:
            self._kind = kind
            self._log.warning("%s.%s error=%s", self._who, kind, " ".join(str(error).split()) or type(error).__name__)

    def is_over(self) -> None:
        """Redis did what it was asked to."""
        if self._kind is not None:
            self._log.info("%s.redis_is_back", self._who)
        self._kind = None
