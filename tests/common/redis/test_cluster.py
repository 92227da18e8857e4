"""The client of a Redis Cluster: a node that does not answer delays only the commands for its own keys."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from tests.support.ports import HOST
from tests.support.redis_servers import ClusterServers, Server, wait_until

from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.connect import connect, node_of
from llamaq.common.redis.server_state import server_time_ms
from llamaq.common.redis.shared_round_trips import Command

pytestmark = pytest.mark.starts_processes


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with ClusterServers(tmp_path_factory.mktemp("nodes")) as servers:
        yield servers


@pytest.fixture
def silent(servers: ClusterServers) -> Iterator[Server]:
    """A master that is stopped: it accepts connections and does not answer."""
    server = servers.masters[0]
    server.signal(signal.SIGSTOP)
    yield server
    server.signal(signal.SIGCONT)
    wait_until(lambda: all(_is_ok(one) for one in servers.servers), "all nodes serve all hash slots")


def _is_ok(server: Server) -> bool:
    with server.client() as client:
        return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def keys_of(servers: ClusterServers) -> dict[int, str]:
    """Return a key of each master, by the port of the master."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < len(servers.masters):
        key = f"test-{number}"
        found.setdefault(servers.masters[key_slot(key.encode()) * 3 // 16384].port, key)
        number += 1
    return found


async def test_commands_and_pipelines_reach_every_master(servers: ClusterServers) -> None:
    redis, keys = connect(servers.url, name="test"), keys_of(servers)
    for port, key in keys.items():
        await redis.set(key, port)
        assert node_of(redis, key) == f"{HOST}:{port}"
    script = redis.register_script("return redis.call('GET', KEYS[1])")
    async with redis.pipeline(transaction=False) as pipe:
        for key in keys.values():
            pipe.get(key)
            await script(keys=[key], client=pipe)
        assert await pipe.execute() == [value for port in keys for value in [str(port).encode()] * 2]
    assert [await script(keys=[key]) for key in keys.values()] == [str(port).encode() for port in keys]
    assert {key async for key in redis.scan_iter(match="test-*")} >= {key.encode() for key in keys.values()}
    await redis.delete(*list(keys.values())[:1])
    await redis.aclose()


async def test_the_time_of_a_key_is_that_of_its_master(servers: ClusterServers) -> None:
    redis, keys = connect(servers.url, name="test"), keys_of(servers)

    def n_calls() -> dict[int, int]:
        """Return how many scripts each master has run, by its port."""
        found = {}
        for server in servers.masters:
            with server.client() as client:
                found[server.port] = client.info("commandstats").get("cmdstat_eval", {}).get("calls", 0)
        return found

    for port, key in keys.items():
        before, began_s = n_calls(), time.time()
        now_s = await server_time_ms(redis, key) / 1000
        assert began_s - 1 < now_s < time.time() + 1
        assert n_calls() == before | {port: before[port] + 1}
    await redis.aclose()


async def test_commands_for_other_masters_are_quick_while_one_master_is_silent(
    servers: ClusterServers, silent: Server
) -> None:
    keys = keys_of(servers)
    lost = keys.pop(silent.port)
    redis = connect(f"{servers.url}?socket_timeout=600", name="test", failover_s=0)
    stuck: list[Any] = [asyncio.ensure_future(redis.get(lost)) for _ in range(40)]
    for _ in range(20):  # the map was read from another node, and no command waited for the silent one
        await asyncio.gather(*(redis.set(key, "value") for key in keys.values()), redis.time(), redis.ping())
    assert not any(task.done() for task in stuck)
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    await redis.aclose()


async def test_a_client_starts_and_its_errors_end_in_time_while_one_master_is_dead(servers: ClusterServers) -> None:
    dead = servers.masters[2]
    keys = keys_of(servers)
    lost = keys.pop(dead.port)
    dead.kill()
    try:
        redis = connect(servers.url, name="test", failover_s=0)
        for key in keys.values():
            await redis.set(key, "value")
        started_s = time.monotonic()
        failed = await asyncio.gather(*(redis.get(lost) for _ in range(200)), return_exceptions=True)
        assert all(isinstance(error, RedisConnectionError) for error in failed)
        assert time.monotonic() - started_s < 10
        await asyncio.gather(*(redis.get(key) for key in keys.values()))
    finally:
        dead.start()
    for _ in range(600):
        try:
            await redis.set(lost, "again")
            break
        except RedisError:
            await asyncio.sleep(0.1)
    assert await redis.get(lost) == b"again"
    await redis.aclose()


async def test_moved_and_ask_replies_are_followed(servers: ClusterServers) -> None:
    keys = keys_of(servers)
    old, new = servers.masters[0], servers.masters[1]
    key = keys[old.port]
    slot = key_slot(key.encode())
    redis = connect(servers.url, name="test")
    script = redis.register_script("return redis.call('GET', KEYS[1]) .. ' the move'")
    await redis.set(key, "before")
    assert await script(keys=[key]) == b"before the move"
    with servers.slot_moves(slot, new, key):
        assert await redis.get(key) == b"before"  # ASK
        assert await script(keys=[key]) == b"before the move"  # the new master does not know the script
    assert await redis.get(key) == b"before"  # MOVED
    async with redis.pipeline(transaction=False) as pipe:
        pipe.get(key)
        assert await pipe.execute() == [b"before"]
    assert node_of(redis, key) == f"{HOST}:{new.port}"
    await redis.aclose()


async def test_a_transaction_follows_a_slot_that_moves(servers: ClusterServers) -> None:
    old, new = servers.masters[1], servers.masters[0]
    key = next(f"moved-{n}" for n in range(10**6) if servers.master_of(key_slot(f"moved-{n}".encode())) is old)
    redis = connect(servers.url, name="test", failover_s=10)
    await redis.ping()
    with servers.slot_moves(key_slot(key.encode()), new):
        pass
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(key, "after")
        pipe.get(key)
        assert await pipe.execute() == [True, b"after"]
    await redis.aclose()


async def test_a_blocking_read_and_the_command_behind_it_follow_a_slot_that_moves(servers: ClusterServers) -> None:
    old, new = servers.masters[1], servers.masters[2]
    key = keys_of(servers)[old.port]
    redis = connect(servers.url, name="test")
    assert isinstance(redis, RetryingRedis)
    wait = ("XREAD", "COUNT", 1, "BLOCK", 10, "STREAMS", key, "0-0")
    commands: list[Command] = [(wait, {}), (("XADD", key, "*", "name", "value"), {})]
    await redis.delete(key)
    assert (await redis.send_together(key, commands))[0] == []
    with old.client() as at_old, new.client() as at_new:
        at_old.execute_command("DEL", key)
        with servers.slot_moves(key_slot(key.encode()), new):
            pass
        _, entry = await redis.send_together(key, commands)
        assert at_new.execute_command("XLEN", key) == 1
    assert (await redis.send_together(key, commands))[0] == [[key.encode(), [(entry, {b"name": b"value"})]]]
    await redis.aclose()


async def test_a_write_and_the_wait_behind_it_are_not_executed_by_two_masters(servers: ClusterServers) -> None:
    old, new = servers.masters[2], servers.masters[0]
    key = next(f"both-{n}" for n in range(10**6) if servers.master_of(key_slot(f"both-{n}".encode())) is old)
    redis: Any = connect(servers.url, name="test")
    commands: list[Command] = [(("HSET", key, "name", "value"), {}), (("WAIT", 0, 1), {})]
    assert await redis.send_together(key, commands) == [1, 0]
    with old.client() as at_old, new.client() as at_new:
        at_old.execute_command("DEL", key)
        moves, fails = servers.slot_moves(key_slot(key.encode()), new), pytest.raises(RedisConnectionError)
        with moves, fails:
            await redis.send_together(key, commands)  # ASK
        at_new.config_resetstat()
        assert await redis.call_with_retry(lambda: redis.send_together(key, commands)) == [1, 0]  # MOVED
        calls: Any = at_new.info("commandstats")
    assert [calls[f"cmdstat_{name}"]["calls"] for name in ("hset", "wait")] == [1, 1]
    await redis.aclose()


async def test_commands_to_a_node_that_leaves_the_cluster_fail_as_after_a_lost_connection(
    servers: ClusterServers,
) -> None:
    leaving, other = servers.masters[:2]
    redis: Any = connect(f"redis+cluster://{HOST}:{other.port}", name="test")
    node = (await redis.masters())[f"{HOST}:{leaving.port}"]
    key = next(f"left-{n}" for n in range(10**6) if servers.master_of(key_slot(f"left-{n}".encode())) is leaving)
    call = asyncio.create_task(node.blpop([key], timeout=60))
    with leaving.client() as client:
        await asyncio.to_thread(wait_until, lambda: client.info("clients")["blocked_clients"], "BLPOP waits")
    redis._use_map((HOST, other.port), [[0, 16383, [HOST.encode(), other.port]]])
    with pytest.raises(RedisConnectionError, match="the connections are closed"):
        await call
    await redis.aclose()


async def test_a_command_fails_if_its_client_is_closed_while_the_map_is_read(servers: ClusterServers) -> None:
    redis = connect(servers.url, name="test-closed")
    call = asyncio.ensure_future(redis.incr("closed"))
    await asyncio.sleep(0)
    await redis.aclose()
    with pytest.raises(RuntimeError, match="this client was closed"):
        await call
    for server in servers.servers:
        with server.client() as client:
            await asyncio.to_thread(
                wait_until, lambda: all(one["name"] != "test-closed" for one in client.client_list()), "it is closed"
            )
