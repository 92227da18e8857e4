"""The memory of Redis: of one server, of each master of a cluster, and without a permission for INFO."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.redis_servers import ClusterServers

from llamaq.common.redis.connect import connect
from llamaq.common.redis.server_state import ServerMemory, read_server_memory
from llamaq.worker.local.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.starts_processes


async def test_the_memory_of_one_server_and_its_limit() -> None:
    with EmbeddedRedis() as server:
        redis = connect(server.url, name="test")
        await redis.config_set("maxmemory", 0)
        (free,) = await read_server_memory(redis)
        await redis.config_set("maxmemory", 4 * free.used_bytes)
        (limited,) = await read_server_memory(redis)
        await redis.acl_setuser("default", enabled=True, commands=["-info"])
        assert await read_server_memory(redis) == ()
        await redis.aclose()
    assert (free.node, free.max_bytes, free.fullness) == ("", 0, 0.0)
    assert free.used_bytes > 0
    assert limited.max_bytes == 4 * free.used_bytes
    assert limited.fullness == pytest.approx(0.25, rel=0.5)


async def test_the_memory_of_each_master_of_a_cluster_that_tells(tmp_path: Path) -> None:
    with ClusterServers(tmp_path) as servers:
        redis = connect(servers.url, name="test")
        found = await read_server_memory(redis)
        refusing, *others = servers.masters
        with refusing.client() as master:
            master.acl_setuser("default", enabled=True, commands=["-info"])
        fewer = await read_server_memory(redis)
        await redis.aclose()
    assert ports_of(found) == {master.port for master in servers.masters}
    assert ports_of(fewer) == {master.port for master in others}


def ports_of(found: tuple[ServerMemory, ...]) -> set[int]:
    return {int(memory.node.rpartition(":")[2]) for memory in found}
