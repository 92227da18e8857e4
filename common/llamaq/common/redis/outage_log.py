"""Logs a Redis outage once, however many commands fail during it."""

from __future__ import annotations

import logging

from redis.exceptions import RedisError

from llamaq.common.redis.redis_errors import is_full


class OutageLog:
    """Logs one warning when Redis begins to fail or the kind of failure changes, and one message when Redis recovers.

    The object is true during an outage.
    """

    def __init__(self, log: logging.Logger, component: str) -> None:
        """Write to `log`. The events are named `<component>.redis_full`, `.redis_error` and `.redis_recovered`."""
        self._log = log
        self._component = component
        self._outage: str | None = None

    def __bool__(self) -> bool:
        return self._outage is not None

    def __repr__(self) -> str:
        return f"<OutageLog of {self._component}: {self._outage or 'none'}>"

    def record_failure(self, error: RedisError) -> None:
        """Record that a command failed."""
        outage = "redis_full" if is_full(error) else "redis_error"
        if outage != self._outage:
            self._outage = outage
            message = " ".join(str(error).split()) or type(error).__name__
            self._log.warning("%s.%s error=%s", self._component, outage, message)

    def record_success(self) -> None:
        """Record that a command succeeded, which ends the outage."""
        if self._outage is not None:
            self._log.info("%s.redis_recovered", self._component)
        self._outage = None
