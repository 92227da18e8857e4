"""A server that does not know a script gets its text, even when its scripts are flushed again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from llamaq.common.redis import connect as connect_module
from llamaq.common.redis.connect import connect
from llamaq.worker.local.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.starts_processes

ECHO = "return ARGV[1]"
JOIN = "return ARGV[1] .. ARGV[1]"


@pytest.fixture(scope="module")
def forgetful_url() -> Iterator[str]:
    """A server that forgets all scripts before each write that calls one by its hash."""
    with EmbeddedRedis() as server, Redis.from_url(server.url) as redis, pytest.MonkeyPatch.context() as patch:
        send = connect_module._send

        async def forget(connection: Any, command: Any) -> None:
            if b"EVALSHA" in (command if isinstance(command, bytes) else b"".join(command)):
                redis.script_flush()
            await send(connection, command)

        patch.setattr(connect_module, "_send", forget)
        yield server.url


async def test_a_call_succeeds_although_scripts_are_flushed_before_each_call(forgetful_url: str) -> None:
    async with connect(forgetful_url, name="test-scripts") as redis:
        echo = redis.register_script(ECHO)
        assert [await echo(args=[word]) for word in ("a", "b")] == [b"a", b"b"]


@pytest.mark.parametrize("transaction", [False, True])
@pytest.mark.parametrize("n_times", [1, 20])
async def test_a_pipeline_succeeds_although_scripts_are_flushed_before_each_call(
    forgetful_url: str, transaction: bool, n_times: int
) -> None:
    async with connect(forgetful_url, name="test-scripts") as redis:
        echo, join = redis.register_script(ECHO), redis.register_script(JOIN)
        pipe = redis.pipeline(transaction=transaction)
        for _ in range(n_times):
            pipe.echo("first")
            await echo(args=["a"], client=pipe)
            await join(args=["b"], client=pipe)
        assert await pipe.execute() == [b"first", b"a", b"bb"] * n_times
