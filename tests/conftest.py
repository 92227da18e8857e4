"""A real redis-server for the whole session, a queue of its own for each test, and `async def` tests."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import socket
from collections.abc import Iterator

import pytest

from llamaq.worker.embedded import EmbeddedRedis

ASYNC_TEST_TIMEOUT_S = 60


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own; closing it checks that no task is left behind badly."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def bounded() -> None:
        async with asyncio.timeout(ASYNC_TEST_TIMEOUT_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A redis-server in memory. Raises where there is no binary: tests on Redis never skip themselves."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def queue() -> str:
    """A queue that no other test knows: tests share one Redis and need no flush."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
