"""Logs a Redis outage with few messages, although many commands may fail during the outage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from llamaq.common.redis.write_refusals import is_full

REPEAT_S = 60.0


class OutageLog:
    """Logs a warning when Redis begins to fail or the kind of failure changes, and a message when Redis recovers.

    During a long outage, the warning is repeated every `REPEAT_S` seconds. A failure soon after a recovery is not
    logged as a warning. Otherwise a Redis at its memory limit, which fails again and again, would fill the log with
    warnings.

    The object is true during an outage.
    """

    def __init__(self, log: logging.Logger, component: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `log`. The events are named `<component>.redis_full`, `.redis_error` and `.redis_recovered`."""
        self._clock = clock
        self._warned_s: dict[str, float] = {}
        """When each kind of failure was logged as a warning."""
        self._log = log
        self._component = component
        self._outage: str | None = None

    def __bool__(self) -> bool:
        return self._outage is not None

    def __repr__(self) -> str:
        return f"<OutageLog of {self._component}: {self._outage or 'none'}>"

    def record_failure(self, error: RedisError | OSError) -> None:
        """Record that a command failed."""
        outage = "redis_full" if is_full(error) else "redis_error"
        now_s = self._clock()
        is_new, is_due = outage != self._outage, now_s - self._warned_s.get(outage, -REPEAT_S) >= REPEAT_S
        if is_new or is_due:
            level = logging.WARNING if is_due else logging.INFO
            message = " ".join(str(error).split()) or type(error).__name__
            self._log.log(level, "%s.%s error=%s", self._component, outage, message)
        if is_due:
            self._warned_s[outage] = now_s
        self._outage = outage

    def record_success(self) -> None:
        """Record that a command succeeded, which ends the outage."""
        if self._outage is not None:
            self._log.info("%s.redis_recovered", self._component)
        self._outage = None
