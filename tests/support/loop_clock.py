"""Moves the clock of the running event loop, so that a long timeout ends at once, also on a slow machine."""

from __future__ import annotations

import asyncio

import pytest


def advance_loop_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the running event loop's clock show a time that is later by `seconds`. Timers that are due then fire next."""
    loop = asyncio.get_running_loop()
    earlier = loop.time
    monkeypatch.setattr(loop, "time", lambda: earlier() + seconds)
