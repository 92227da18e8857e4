"""Decides when a worker may trust that the lease of another worker has expired."""

from __future__ import annotations

import time
from collections.abc import Callable

SILENCE_S = 0.75
"""If a server has not answered for this time, there may have been an outage: workers call it four times a second."""
SHORT_PAUSE_S = 1.0
"""How long leases are not trusted after a short outage or a short stop of this worker.

An outage is short if it took less than a third of a lease. A stop, on a busy machine for example, is short if it took
less than a lease.
"""


class LeaseGuard:
    """Watches the clock of the Redis server of one partition.

    After an outage of Redis, leases look expired because their workers could not renew them. After a jump of its clock,
    they look expired although no time has passed. In both cases, the workers get `lease_s` seconds to renew them. After
    a short outage, they get one second: leases of this worker's length have not expired yet, but shorter ones may have.

    Args:
        lease_s: The lease of this worker, in seconds.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._seen_s: float | None = None
        """When the server answered last. None: it has not answered yet."""
        self._server_ms = 0
        """The time of the server in that answer."""
        self._distrusted_until_s = 0.0

    def observe(self, server_ms: int, waited_s: float) -> None:
        """Record that the server answers now.

        Args:
            server_ms: The time of the server, in milliseconds since the epoch.
            waited_s: How long this worker has waited for the answer, in seconds. The rest of the time since the
                last answer is the pause before the question. It is long only if this worker did not run.
        """
        now_s = self._clock()
        if self._seen_s is not None:
            passed_s = now_s - self._seen_s
            is_jump = (server_ms - self._server_ms) / 1000 - passed_s > SILENCE_S
            # Workers renew their leases after a third of `lease_s`.
            if is_jump or waited_s > self._lease_s / 3 or passed_s > self._lease_s:
                self._distrust(self._lease_s)
            elif passed_s > SILENCE_S:
                self._distrust(SHORT_PAUSE_S)
        self._seen_s, self._server_ms = now_s, server_ms

    def _distrust(self, time_s: float) -> None:
        self._distrusted_until_s = max(self._distrusted_until_s, self._clock() + time_s)

    def trusted_until_ms(self) -> int:
        """Return the time of the server, in milliseconds since the epoch, until which expired leases may be trusted.

        0: they may not be trusted now.
        """
        now_s = self._clock()
        if self._seen_s is None or now_s - self._seen_s > SILENCE_S or now_s < self._distrusted_until_s:
            return 0
        return self._server_ms + int((now_s - self._seen_s + SILENCE_S) * 1000)

    def __repr__(self) -> str:
        return f"<LeaseGuard trusted_until_ms={self.trusted_until_ms()}>"
