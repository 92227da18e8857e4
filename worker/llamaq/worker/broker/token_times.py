"""The times of one job's tokens, in the form in which they are stored with the job.

The text of `TokenTimes` is the field `token_times` of a job's hash. Each flush stores this field with the tokens, so
the next worker of the job continues it. At the end of the job, `scripts/_metrics.lua` adds the counts of the job to the
counts of the queue.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Self

from llamaq.common.metrics.buckets import INFINITE, SHORT_TIMES_MS

_NAMES = (*map(str, SHORT_TIMES_MS), INFINITE)


@dataclass(slots=True)
class TokenTimes:
    """When a job generated its first and its last token, and how much time was between two tokens.

    Times are milliseconds since the submit of the job, or since the later time for which it was submitted.
    """

    first_ms: int | None = None
    """When the first token was generated. None: no token was generated."""
    last_ms: int = 0
    """When the last token was generated."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of times between two tokens, by the upper bound of their bucket in milliseconds."""

    def add(self, time_ms: int) -> None:
        """Record that a token was generated at this time."""
        if self.first_ms is None:
            self.first_ms = time_ms
        else:
            name = _NAMES[bisect_left(SHORT_TIMES_MS, time_ms - self.last_ms)]
            self.counts[name] = self.counts.get(name, 0) + 1
        self.last_ms = max(time_ms, self.last_ms)

    def encode(self) -> str:
        """Return the text that is stored: `FIRST LAST BOUND=COUNT BOUND=COUNT ...`. Empty: there is no token."""
        if self.first_ms is None:
            return ""
        counts = "".join(f" {bound}={count}" for bound, count in self.counts.items())
        return f"{self.first_ms} {self.last_ms}{counts}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the times in a stored text. A text that another client has damaged counts as empty."""
        if not text:  # as of most jobs, and quicker than the exception
            return cls()
        try:
            first, last, *counts = text.split()
            pairs = (count.split("=") for count in counts)
            return cls(int(first), int(last), {bound: int(count) for bound, count in pairs if bound in _NAMES})
        except ValueError:
            return cls()
