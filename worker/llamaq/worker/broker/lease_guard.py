"""Decides when a worker may trust that the lease of another worker has expired."""

from __future__ import annotations

import time
from collections.abc import Callable


class LeaseGuard:
    """Watches the clock of the Redis server of one partition.

    After an outage of Redis, or after a jump of its clock, leases look expired although their holders are alive: the
    holders could not renew them, or no time has passed. Then the holders get the time of a lease to renew them.

    Args:
        lease_s: The lease of this worker, in seconds.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._tolerance_s = lease_s / 3  # every holder renews its leases after a third of their time
        self._clock = clock
        self._seen_s: float | None = None
        """When the server answered last. None: it has not answered yet."""
        self._server_ms = 0
        """The time of the server in that answer."""
        self._distrusted_until_s = 0.0

    def observe(self, server_ms: int) -> None:
        """Record that the server answers now, with this time in milliseconds since the epoch."""
        now_s = self._clock()
        if self._seen_s is not None:
            passed_s = now_s - self._seen_s
            is_outage = passed_s > self._tolerance_s
            is_jump = (server_ms - self._server_ms) / 1000 - passed_s > self._tolerance_s
            if is_outage or is_jump:
                self._distrusted_until_s = now_s + self._lease_s
        self._seen_s, self._server_ms = now_s, server_ms

    def trusted_until_ms(self) -> int:
        """Return until which time of the server expired leases may be trusted, in milliseconds since the epoch.

        0: they may not be trusted now.
        """
        now_s = self._clock()
        if self._seen_s is None or now_s - self._seen_s > self._tolerance_s or now_s < self._distrusted_until_s:
            return 0
        return self._server_ms + int((now_s - self._seen_s + self._tolerance_s) * 1000)

    def __repr__(self) -> str:
        return f"<LeaseGuard trusted_until_ms={self.trusted_until_ms()}>"
