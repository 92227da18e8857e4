"""The master is found although some Sentinels do not answer, or answer with an error."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.ports import HOST, reserve_ports
from tests.support.redis_servers import IN_MEMORY, SENTINEL_CONFIG, SERVICE, Server
from tests.support.tcp_proxy import Proxy

from llamaq.common.redis.connect import connect
from llamaq.common.redis.sentinel import MasterFinder
from llamaq.common.redis.url import read_url


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """A server to which clients can connect, and that never replies."""
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        yield listener


def n_connections(server: socket.socket) -> int:
    """Return how many clients have connected to a server since the last call."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            number += 1
    return number


def finder_of(*ports: int) -> MasterFinder:
    return MasterFinder(read_url(f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in ports)}/{SERVICE}"))


async def test_the_sentinels_are_asked_with_redis_py_6_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Sentinel, "aclose", raising=False)  # this version does not have it
    with pytest.raises(RedisConnectionError, match="no Sentinel names a master"):
        await finder_of(1).find()


@pytest.mark.slow
async def test_a_sentinel_that_does_not_answer_is_asked_once(silent_server: socket.socket) -> None:
    with pytest.raises(RedisConnectionError, match="no Sentinel names a master"):
        await finder_of(silent_server.getsockname()[1], 1).find()
    assert n_connections(silent_server) == 1


@pytest.mark.slow
async def test_connections_that_wait_for_the_sentinels_share_an_answer(silent_server: socket.socket) -> None:
    finder = finder_of(silent_server.getsockname()[1], 1)
    asking = [asyncio.create_task(finder.find()) for _ in range(20)]
    await asyncio.wait(asking[:1])
    late = [asyncio.create_task(finder.find()) for _ in range(20)]  # these do not get an answer from before their call
    errors = await asyncio.gather(*asking, *late, return_exceptions=True)
    assert all("no Sentinel names a master" in str(error) for error in errors)
    assert n_connections(silent_server) <= 3


async def test_a_connection_is_not_used_if_its_handshake_was_cancelled_while_the_sentinels_were_asked(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_asked = asyncio.Event()

    async def find(_: MasterFinder) -> tuple[str, int]:
        return HOST, urlsplit(proxy.url).port or 0

    async def answer_only_later(*_: object) -> bool:
        if not was_asked.is_set():
            was_asked.set()
            await asyncio.Event().wait()
        return True

    monkeypatch.setattr(MasterFinder, "find", find)
    monkeypatch.setattr(MasterFinder, "is_master", answer_only_later)
    with Proxy(redis_url) as proxy:
        redis = connect(f"redis+sentinel://{HOST}:1/{SERVICE}/5", name="test-database")
        cancelled = asyncio.ensure_future(redis.blpop(["none"]))
        await was_asked.wait()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        info = await redis.client_info()
        assert (info["db"], info["name"]) == (5, "test-database")
        await redis.aclose()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A master, and its only Sentinel."""
    master_port, sentinel_port = reserve_ports(2)
    config = SENTINEL_CONFIG.format(service=SERVICE, host=HOST, port=master_port, quorum=1, down_ms=500)
    master, sentinel = Server(tmp_path, master_port, IN_MEMORY), Server(tmp_path, sentinel_port, config=config)
    try:
        master.start()
        sentinel.start()
        yield master, sentinel
    finally:
        sentinel.kill()
        master.kill()


@pytest.mark.starts_processes
async def test_a_server_that_is_no_sentinel_is_skipped(servers: tuple[Server, Server]) -> None:
    master, sentinel = servers
    assert await finder_of(master.port, sentinel.port).find() == (HOST, master.port)
    with pytest.raises(RedisConnectionError, match=r"no Sentinel names a master .*unknown command"):
        await finder_of(master.port).find()


@pytest.mark.starts_processes
async def test_the_last_answer_counts_while_no_sentinel_answers(servers: tuple[Server, Server]) -> None:
    master, sentinel = servers
    finder = finder_of(sentinel.port)
    await finder.find()
    sentinel.signal(signal.SIGSTOP)
    assert await finder.find() == (HOST, master.port)
    sentinel.signal(signal.SIGCONT)
    master.kill()

    async def names_no_master() -> bool:
        with suppress(RedisConnectionError):
            await finder.find()
            return False
        return True

    async with asyncio.timeout(30):
        while not await names_no_master():  # noqa: ASYNC110  # the Sentinel notices that the master is down
            await asyncio.sleep(0.05)
