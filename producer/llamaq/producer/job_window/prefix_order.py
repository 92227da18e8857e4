"""The order in which waiting requests are submitted: requests that share a prefix follow each other."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.job_window.window_job import WindowJob

T = TypeVar("T")


class PrefixOrder(Generic[T]):
    """The waiting requests of a window.

    All requests that wait at one time are sorted by their prompts. They are submitted in this order, before any later
    request. So a common prefix of neighbours is computed once and is still cached for the next request. No request
    waits forever.
    """

    def __init__(self) -> None:
        self._sorted: deque[WindowJob[T]] = deque()
        self._added: list[WindowJob[T]] = []

    def __len__(self) -> int:
        return len(self._sorted) + len(self._added)

    def __repr__(self) -> str:
        return f"<PrefixOrder sorted={len(self._sorted)} added={len(self._added)}>"

    def add(self, job: WindowJob[T]) -> None:
        """Add a request."""
        self._added.append(job)

    def put_back(self, jobs: list[WindowJob[T]]) -> None:
        """Add requests that were popped, in front of all others."""
        self._sorted.extendleft(reversed(jobs))

    def pop(self, n: int) -> list[WindowJob[T]]:
        """Remove and return at most `n` requests."""
        popped: list[WindowJob[T]] = []
        while len(popped) < n and len(self):
            if not self._sorted:
                self._sorted.extend(sorted(self._added, key=lambda job: prefix_key(job.request)))
                self._added.clear()
            popped.append(self._sorted.popleft())
        return popped


def prefix_key(request: JobRequest) -> tuple[str, str, tuple[int, ...]]:
    """Return a value for which sorting brings requests with a common prefix together."""
    text = request.prompt or ""
    if request.messages is not None:
        text = "\0".join(f"{message.role}\0{message.content}" for message in request.messages)
    return request.cache_salt, text, request.tokens or ()
