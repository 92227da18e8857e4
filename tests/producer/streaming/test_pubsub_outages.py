"""What a pub/sub connection logs in an outage of Redis."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.support.ports import HOST
from tests.support.tcp_proxy import Proxy

from llamaq.common.redis.connect import connect, make_connection
from llamaq.producer.streaming import pubsub_connection
from llamaq.producer.streaming.pubsub_connection import PubSubConnection


async def test_each_outage_is_one_warning(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub_connection, "BACKOFF_S", (0.001, 0.002))
    caplog.set_level(logging.DEBUG, pubsub_connection.__name__)
    confirmed = asyncio.Event()
    with Proxy(redis_url) as proxy:
        redis = connect(proxy.url, name="test")
        opened = PubSubConnection(lambda: make_connection(redis, ""), lambda *_: None, lambda _: confirmed.set())
        opened.add(b"channel")
        for outage in range(1, 3):
            await confirmed.wait()
            confirmed.clear()
            proxy.refuse()
            n_before = len(caplog.records)
            proxy.cut()
            while len(caplog.records) < n_before + 5:  # noqa: ASYNC110  # the log has no event
                await asyncio.sleep(0.001)
            warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert len(warnings) == outage
            proxy.accept()
        opened.task.cancel()
        await asyncio.wait([opened.task])
        await redis.aclose()


async def test_a_channel_that_is_added_again_does_not_delay_the_ping(redis_url: str) -> None:
    """Each change starts the wait for the next PING again. Without PINGs, the connection would count as broken."""
    redis = connect(redis_url, name="test")
    confirmed = asyncio.Event()
    opened = PubSubConnection(lambda: make_connection(redis, ""), lambda *_: None, lambda _: confirmed.set())
    opened.add(b"channel")
    await confirmed.wait()
    opened.add(b"channel")
    assert not opened._changed.is_set()
    opened.add(b"other")
    assert opened._changed.is_set()
    opened.task.cancel()
    await asyncio.wait([opened.task])
    await redis.aclose()


async def test_a_connection_whose_server_no_longer_reads_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub_connection, "PING_S", 0.01)
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def read_only_the_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"test\r\n")
        writer.write(b"+OK\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await accepted.put(writer)

    async with await asyncio.start_server(read_only_the_handshake, HOST, 0) as server:
        redis = connect(f"redis://{HOST}:{server.sockets[0].getsockname()[1]}?health_check_interval=0", name="test")
        opened = PubSubConnection(lambda: make_connection(redis, ""), lambda *_: None, lambda _: None)
        opened.add(b"x" * 50_000_000)  # more than the buffers of the sockets can hold
        first, second = await accepted.get(), await accepted.get()
        opened.task.cancel()
        await asyncio.wait([opened.task])
        await redis.aclose()
        first.transport.abort()
        second.transport.abort()
