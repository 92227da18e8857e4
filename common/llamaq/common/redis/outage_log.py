"""Logs a Redis outage once in a while, however many commands fail during it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from llamaq.common.redis.redis_errors import is_full

REPEAT_S = 60.0


class OutageLog:
    """Logs a warning when Redis begins to fail or the kind of failure changes, and a message when Redis recovers.

    During a long outage, the warning is repeated every `REPEAT_S` seconds.

    The object is true during an outage.
    """

    def __init__(self, log: logging.Logger, component: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `log`. The events are named `<component>.redis_full`, `.redis_error` and `.redis_recovered`."""
        self._clock = clock
        self._logged_s = 0.0
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
        now_s = self._clock()
        if outage != self._outage or now_s - self._logged_s >= REPEAT_S:
            self._outage, self._logged_s = outage, now_s
            message = " ".join(str(error).split()) or type(error).__name__
            self._log.warning("%s.%s error=%s", self._component, outage, message)

    def record_success(self) -> None:
        """Record that a command succeeded, which ends the outage."""
        if self._outage is not None:
            self._log.info("%s.redis_recovered", self._component)
        self._outage = None
