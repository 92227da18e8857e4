"""The heartbeat of a worker in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.exceptions import RedisError, ResponseError
from tests.support.ports import HOST
from tests.support.tick_loop_rig import idle_tick_loop
from tests.support.worker_cards import make_card

from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.connect import connect
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient
from llamaq.worker.broker import heartbeat as heartbeat_module
from llamaq.worker.broker.heartbeat import Heartbeat
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.local.embedded_redis import EmbeddedRedis


def heartbeat_of(redis: Any, queue: str) -> Heartbeat:
    """Return the heartbeat of a worker that has the name of its queue."""
    card, shared = make_card(queue, queue), SharedState()
    served = WorkerQueue(redis, Keys(), queue, 1)
    return Heartbeat(served, card, b"vocabulary", idle_tick_loop(shared), shared, every_s=1.0)


@asynccontextmanager
async def cut_before(command: bytes, url: str) -> AsyncIterator[str]:
    """Run a proxy of a Redis that breaks a connection as soon as it sends this command. Yields its URL."""
    connections: list[asyncio.Task[Any] | None] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        from_server, to_server = await asyncio.open_unix_connection(urlsplit(url).path)

        async def forward_replies() -> None:
            while data := await from_server.read(65536):
                writer.write(data)

        replies = asyncio.create_task(forward_replies())
        is_cut = False
        while not is_cut and (data := await reader.read(65536)):
            before, found, _ = data.partition(command)
            to_server.write(before)
            is_cut = bool(found)
        to_server.write_eof()  # the server executes what it has received, and then closes the connection
        await replies
        for end in (to_server, writer):
            end.close()
            await end.wait_closed()

    async with await asyncio.start_server(forward, HOST, 0) as server:
        yield f"redis://{HOST}:{server.sockets[0].getsockname()[1]}/0"
    await asyncio.gather(*(one for one in connections if one is not None))


async def test_the_card_of_a_worker_expires(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await heartbeat_of(client.redis, queue).beat()
        assert [worker.card.worker for worker in await client.workers()] == [queue]
        assert 0 < await client.redis.pttl(Keys().worker(queue)) <= 5000


async def test_a_queue_without_a_heartbeat_for_more_than_a_week_is_no_longer_listed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        now_ms = await server_time_ms(client.redis)
        for name, age_days in (("left", 8), ("stopped", 6)):
            await client.redis.zadd(Keys().queues(), {f"{queue}-{name}": now_ms - age_days * 24 * 3600 * 1000})
        await heartbeat_of(client.redis, queue).beat()
        ages = [await client.redis.zscore(Keys().queues(), f"{queue}{end}") for end in ("-left", "-stopped", "")]
        assert [age is not None for age in ages] == [False, True, True]


async def test_the_times_of_heartbeats_are_those_of_the_server_with_the_list(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, the time of the card is that of any node."""

    async def time_of_another_node(_: object) -> int:
        return 1

    async with AsyncClient(redis_url, queue) as client:
        before_ms = await server_time_ms(client.redis)
        monkeypatch.setattr(heartbeat_module, "server_time_ms", time_of_another_node)
        await heartbeat_of(client.redis, queue).beat()
        for key in (Keys().workers(queue), Keys().queues()):
            score: Any = await client.redis.zscore(key, queue)
            assert before_ms <= score <= await server_time_ms(client.redis)


@pytest.mark.starts_processes
async def test_a_heartbeat_renews_the_times_of_its_worker_and_its_queue_while_redis_is_full(queue: str) -> None:
    with EmbeddedRedis() as server:  # of its own, because `maxmemory` applies to the whole server
        async with AsyncClient(server.url, queue) as client:
            redis, heartbeat = client.redis, heartbeat_of(client.redis, queue)
            members = {Keys().workers(queue): queue, Keys().queues(): queue}
            await heartbeat.beat()
            for key, member in members.items():
                await redis.zadd(key, {member: 1})
            await redis.config_set("maxmemory", 1)
            with pytest.raises(ResponseError, match="maxmemory"):
                await redis.set("full", 1)
            await heartbeat.beat()
            await redis.config_set("maxmemory", 0)
            times: list[Any] = [await redis.zscore(key, member) for key, member in members.items()]
            assert min(times) > 1


async def test_no_card_is_stored_without_an_expiry_when_the_connection_breaks_within_a_heartbeat(
    redis_url: str, queue: str
) -> None:
    async with cut_before(b"EXPIRE", redis_url) as url, AsyncClient(redis_url, queue) as client:
        await heartbeat_of(client.redis, queue).beat()  # the server knows the scripts from now on
        await client.redis.delete(Keys().worker(queue))
        redis = connect(url, name="test", failover_s=0)
        with pytest.raises(RedisError):
            await heartbeat_of(redis, queue).beat()
        await redis.aclose()
        assert await client.redis.pttl(Keys().worker(queue)) > 0, "the card is stored, and expires"
