"""Lets the timeout of a call end as soon as the call waits for its job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import pytest
from tests.support.loop_clock import advance_loop_clock

from llamaq.producer import AsyncClient

T = TypeVar("T")


class AfterTimeout(Protocol):
    async def __call__(self, client: AsyncClient, call: Awaitable[T], timeout_s: float = 30.0) -> T:
        """Return or raise what a call of this client does when its timeout ends while it waits for its job.

        The submit of the job has no limit, so that a busy machine has no influence. No other call of the client may
        begin to wait meanwhile.
        """


@pytest.fixture
def after_timeout(monkeypatch: pytest.MonkeyPatch) -> AfterTimeout:
    async def after_timeout(client: AsyncClient, call: Awaitable[T], timeout_s: float = 30.0) -> T:
        n_before = n_waiting_calls(client)
        waiting = asyncio.ensure_future(call)
        while n_waiting_calls(client) == n_before and not waiting.done():  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.001)
        advance_loop_clock(monkeypatch, timeout_s)
        return await waiting

    return after_timeout


async def until_waiting(client: AsyncClient, n_calls: int) -> None:
    """Wait until this number of calls of a client wait for their jobs."""
    while n_waiting_calls(client) != n_calls:  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.001)


def n_waiting_calls(client: AsyncClient) -> int:
    return sum(map(len, client.subscriber._listeners.values()))
