"""The outcomes of requests that the caller of a window has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

from llamaq.common.protocol.job_outcome import Result

T = TypeVar("T")

Outcome = Result | Exception
"""How a job ended: its result, or its error."""


class OutcomeQueue(Generic[T]):
    """Passes each outcome once to the caller of a window, and then the error that ends the window."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[T, Outcome]] = deque()
        self._has_news = asyncio.Event()
        self.failure: Exception | None = None
        """The error that ends the window. None: it has not ended."""

    def __repr__(self) -> str:
        return f"<OutcomeQueue {len(self._outcomes)} outcomes, failure={self.failure!r}>"

    def add(self, tag: T, outcome: Outcome) -> None:
        """Add the outcome of a request."""
        self._outcomes.append((tag, outcome))
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Let `take` raise an error after the outcomes that are there."""
        self.failure = error
        self._has_news.set()

    async def take(self, timeout_s: float | None = None) -> list[tuple[T, Outcome]]:
        """Wait for outcomes, and return all that are there.

        Args:
            timeout_s: Longest wait in seconds, after which the list is empty. None: no limit.

        Raises:
            Exception: The error that ends the window.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._outcomes and self.failure is None:
                    self._has_news.clear()
                    await self._has_news.wait()
        if self.failure is not None and not self._outcomes:
            raise self.failure
        found = list(self._outcomes)
        self._outcomes.clear()
        return found
