"""Growing delays between attempts, for a loop that retries without a limit."""

from __future__ import annotations

from redis.backoff import ExponentialBackoff

MAX_DOUBLINGS = 60
"""Upper bound on the exponent. `ExponentialBackoff` computes a power of two before it applies its limit, and a larger
power could overflow."""


class Backoff:
    """Delays that double after each failure, from `first_s` to `longest_s` seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._delays = ExponentialBackoff(cap=longest_s, base=first_s)
        self._n_failures = 0

    def next_delay_s(self) -> float:
        """Count one more failure and return the delay in seconds before the next attempt."""
        delay_s = self._delays.compute(min(self._n_failures, MAX_DOUBLINGS))
        self._n_failures += 1
        return delay_s

    def reset(self) -> None:
        """Start with `first_s` again, after a success."""
        self._n_failures = 0

    def __repr__(self) -> str:
        return f"<Backoff failures={self._n_failures}>"
