"""The master is found although some Sentinels do not answer, or answer with an error."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.ports import HOST, reserve_ports
from tests.support.redis_servers import IN_MEMORY, SENTINEL_CONFIG, SERVICE, Server

from llamaq.common.redis.sentinel import SENTINEL_TIMEOUT_S, MasterFinder
from llamaq.common.redis.url import read_url


@pytest.fixture
def silent_port() -> Iterator[int]:
    """The port of a server that accepts connections and never replies."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def finder_of(*ports: int) -> MasterFinder:
    return MasterFinder(read_url(f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in ports)}/{SERVICE}"))


@pytest.mark.slow
async def test_a_sentinel_that_does_not_answer_is_asked_once(silent_port: int) -> None:
    start_s = time.monotonic()
    with pytest.raises(RedisConnectionError, match="no Sentinel names a master"):
        await finder_of(silent_port, 1).find()
    assert time.monotonic() - start_s < 3 * SENTINEL_TIMEOUT_S


@pytest.mark.starts_processes
async def test_a_server_that_is_no_sentinel_is_skipped(tmp_path: Path) -> None:
    master_port, sentinel_port = reserve_ports(2)
    config = SENTINEL_CONFIG.format(service=SERVICE, host=HOST, port=master_port, quorum=1, down_ms=500)
    master, sentinel = Server(tmp_path, master_port, IN_MEMORY), Server(tmp_path, sentinel_port, config=config)
    try:
        master.start()
        sentinel.start()
        assert await finder_of(master_port, sentinel_port).find() == (HOST, master_port)
        with pytest.raises(RedisConnectionError, match=r"no Sentinel names a master .*unknown command"):
            await finder_of(master_port).find()
    finally:
        sentinel.kill()
        master.kill()
