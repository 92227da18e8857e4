"""Counts what the connections of a client do, so that a test needs no clock to tell whether they share one failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis


def count_timeouts(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the reads that time out on the connections of a client of one server. Returns a function for the count."""
    return _count_calls(redis, "note_timeout", monkeypatch)


def count_connection_attempts(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the attempts of a client of one server to open a connection. Returns a function for the count."""
    return _count_calls(redis, "_connect", monkeypatch)


def _count_calls(redis: Redis, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    n_calls = 0
    kind: Any = redis.connection_pool.connection_class  # a class of its own for each client
    original = getattr(kind, name)

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return original(*args, **options)

    monkeypatch.setattr(kind, name, counted)
    return lambda: n_calls
