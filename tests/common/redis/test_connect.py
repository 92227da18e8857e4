from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import certifi
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Connection, Redis
from redis.exceptions import AuthenticationError, DataError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tests.support.ports import HOST, reserve_ports
from tests.support.redis_servers import IN_MEMORY, Server
from tests.support.redis_timeouts import count_connection_attempts, count_timeouts
from tests.support.tcp_proxy import Proxy

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.common.protocol.script_types import JobFlush, Submission
from llamaq.common.redis.client import retry_until_deadline
from llamaq.common.redis.connect import (
    MAX_CONNECTIONS,
    connect,
    make_connection,
    robust_connection,
)
from llamaq.worker.broker.dedicated_connection import dedicated_connection
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.testing import ManualClock


async def test_a_command_is_sent_without_another_task(redis_url: str) -> None:
    redis = connect(redis_url, name="test")
    await redis.ping()
    tasks: list[object] = []

    def record(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(work)
        return asyncio.Task(work, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(record)
    try:
        assert await redis.ping()
    finally:
        loop.set_task_factory(None)
    assert not tasks
    await redis.aclose()


WORDS = st.text(st.characters(codec="utf-8")) | st.binary() | st.integers() | st.floats()


@given(st.sampled_from(["GET", "CLIENT SETNAME", b"SCRIPT LOAD"]), st.lists(WORDS))
def test_commands_are_encoded_as_by_redis_py(name: str | bytes, words: list[str | bytes | int | float]) -> None:
    plain, robust = Connection(), robust_connection(Connection)()
    assert b"".join(robust.pack_command(name, *words)) == b"".join(plain.pack_command(name, *words))
    both: Any = [(name, *words), ("PING",)]
    assert b"".join(robust.pack_commands(both)) == b"".join(plain.pack_commands(both))


@pytest.mark.parametrize("wrong", [None, True, ["x"], object()])
def test_a_command_with_a_wrong_argument_is_refused(wrong: Any) -> None:
    with pytest.raises(DataError, match=r"SET: .*must be str, int, float or bytes"):
        robust_connection(Connection)().pack_command("SET", "key", wrong)


async def test_a_connection_of_redis_py_6_4_is_closed() -> None:
    class OldConnection(Connection):
        async def disconnect(self, nowait: bool = False) -> None:  # type: ignore[override]
            self.has_waited = not nowait

    connection = robust_connection(OldConnection)()
    await connection.disconnect()
    assert connection.has_waited


async def no_handshake(**_: Any) -> None:
    """Stands for redis-py's function, which awaits a reply."""


@pytest.mark.parametrize("has_faulty_writelines", [False, True])
async def test_a_command_that_cannot_be_sent_in_time_fails_and_closes_its_connection(
    has_faulty_writelines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_faulty_writelines:  # as in Python 3.12.0, where `drain` does not wait for what `writelines` has buffered
        monkeypatch.setattr(asyncio.StreamWriter, "writelines", lambda writer, parts: None)
    with silent_listener() as port:
        redis = connect(f"redis://{HOST}:{port}/?health_check_interval=0", name="test")
        connection: Any = make_connection(redis, "")
        connection.on_connect_check_health = no_handshake
        await connection.connect()
        connection.socket_timeout = 0.1
        with pytest.raises(RedisTimeoutError, match="could not be sent in time"):
            await connection.send_command("SET", "key", b"x" * 50_000_000)
        assert not connection.is_connected
        await redis.aclose()


@pytest.mark.parametrize("connect_timeout_s", [0.05, 600])
async def test_a_client_with_tls_is_closed_although_the_server_is_silent(
    tmp_path: Path, connect_timeout_s: float
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def read_one_command(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"test\r\n")  # CLIENT SETNAME test
        writer.write(b"+OK\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await accepted.put(writer)

    async with await asyncio.start_server(read_one_command, HOST, 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"rediss://{HOST}:{port}?health_check_interval=0&ssl_ca_certs={tmp_path / 'ca.pem'}"
        redis = connect(url, name="test")
        pool: Any = redis.connection_pool
        connection = await pool.get_connection()
        writer = await accepted.get()
        connection.socket_connect_timeout = connect_timeout_s  # redis-py waits this long for the end of a connection
        await pool.release(connection)
        await redis.aclose()
        assert not connection.is_connected
        writer.transport.abort()
        await writer.wait_closed()


async def test_after_a_failed_attempt_to_connect_the_certificate_files_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    shutil.copy(certifi.where(), file)
    redis = connect(f"rediss://{HOST}:1?ssl_ca_certs={file}", name="test")
    connection: Any = make_connection(redis, "")
    with pytest.raises(RedisConnectionError, match="Error 111 connecting"):
        await connection.connect()
    file.write_text("replaced")
    with pytest.raises(RedisConnectionError, match="no certificate"):
        await connection.connect()
    await redis.aclose()


async def test_a_server_without_tls_is_named_as_the_probable_cause_of_a_silent_handshake() -> None:
    with silent_listener() as port:
        redis = connect(f"rediss://{HOST}:{port}?socket_connect_timeout=0.1", name="test")
        with pytest.raises(RedisTimeoutError, match="without TLS needs redis:// in place of rediss://"):
            await make_connection(redis, "").connect()  # type: ignore[no-untyped-call]
        await redis.aclose()


async def test_tls_is_named_as_the_probable_cause_of_a_connection_that_is_closed_before_the_first_reply() -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, HOST, 0) as server:
        redis = connect(f"redis://{HOST}:{server.sockets[0].getsockname()[1]}", name="test")
        with pytest.raises(RedisConnectionError, match="with TLS needs rediss:// in place of redis://"):
            await make_connection(redis, "").connect()  # type: ignore[no-untyped-call]
        await redis.aclose()


async def test_a_refused_password_names_the_setting(redis_url: str) -> None:
    redis = connect(f"{redis_url}{'&' if '?' in redis_url else '?'}username=nobody&password=wrong", name="test")
    with pytest.raises(AuthenticationError, match=r"user or password of --redis-url .* refused: "):
        await make_connection(redis, "").connect()  # type: ignore[no-untyped-call]
    await redis.aclose()


async def test_a_database_that_does_not_exist_names_the_setting(redis_url: str) -> None:
    redis = connect(f"{redis_url}{'&' if '?' in redis_url else '?'}db=999", name="test")
    for _ in range(2):  # a connection with a refused database must not be used later
        with pytest.raises(ResponseError, match=r"database of --redis-url .* refused: DB index is out of range; usual"):
            await redis.ping()
    await redis.aclose()


async def test_a_cancellation_is_never_swallowed(redis_url: str) -> None:
    redis = connect(redis_url, name="test")
    for _ in range(3):
        for turns in range(40):
            task = asyncio.ensure_future(redis.get("nothing"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                assert task.cancelled(), f"a cancellation after {turns} turns of the event loop was swallowed"
    assert await redis.set("after", "all") is True
    assert await redis.getdel("after") == b"all"
    await redis.aclose()


async def test_commands_wait_when_all_connections_are_in_use(redis_url: str) -> None:
    redis = connect(redis_url, name="test-many")
    await open_connections(redis, 500)
    listed = await redis.client_list()
    assert 1 <= len([one for one in listed if one["name"] == "test-many"]) <= 32
    await redis.aclose()


async def open_connections(redis: Redis, n_commands: int) -> None:
    """Send commands at the same time that each need a connection of their own."""
    await asyncio.gather(*(ping_alone(redis) for _ in range(n_commands)))


def test_the_error_of_an_invalid_url_names_the_setting() -> None:
    with pytest.raises(InvalidSettings, match="LLAMAQ_REDIS_URL"):
        connect("localhost:6379", name="test")


@pytest.mark.starts_processes
async def test_a_demoted_server_raises_a_connection_error_for_every_kind_of_command(tmp_path: Path) -> None:
    port, port_of_no_master = reserve_ports(2)
    server = Server(tmp_path, port, IN_MEMORY)
    server.start()
    redis = connect(f"redis://{HOST}:{server.port}/0", name="test-demoted")
    scripts = WorkerScripts(redis, Keys(), "me")
    flush = JobFlush(str(JobId.new("q")), 1, "stream", "0-1", 0, 1, b"event")
    try:
        hash_fields: dict[Any, Any] = {"status": "running", "attempt": 1, "generated": 0, "worker": "me"}
        await redis.hset(Keys().of_job(flush.job_id).job, mapping=hash_fields)
        await redis.replicaof(HOST, str(port_of_no_master))
        with pytest.raises(RedisConnectionError, match="refuses to write"):
            await redis.set("key", "value")
        async with redis.pipeline(transaction=True) as pipe:
            pipe.set("key", "value")
            with pytest.raises(RedisConnectionError, match="refuses to write"):
                await pipe.execute()
        with pytest.raises(RedisConnectionError, match="refuses to write"):
            await scripts.flush([flush], 1000, renew=False)
        with pytest.raises(RedisConnectionError, match="refuses to write"):
            await JobScripts(redis, Keys()).submit(
                Submission(JobId.new("q"), JobRequest(prompt="x"), b"", result_ttl_s=1, event_ttl_s=0, partitions=0)
            )
        await redis.replicaof("NO", "ONE")
        assert (await scripts.flush([flush], 1000, renew=False))[0].stored == 1
    finally:
        await redis.aclose()
        server.kill()


async def test_after_a_timeout_all_older_connections_reconnect(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(redis_url) as proxy:
        redis = connect(f"{proxy.url}?socket_timeout=0.5", name="test-silent")
        await open_connections(redis, 20)
        n_connections = proxy.silence()
        assert n_connections > 12
        n_timeouts = count_timeouts(redis, monkeypatch)
        await redis.ping()
        await open_connections(redis, n_connections)
        assert n_timeouts() > 0
        assert n_timeouts() <= 3, "one for each silent connection"  # a machine that stops may cause another one
        await redis.aclose()


async def test_retries_end_at_the_deadline_but_a_command_is_tried_at_least_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0
    loop = asyncio.get_running_loop()
    clock = ManualClock(loop.time())

    async def pause(seconds: float) -> None:
        clock.now_s += seconds

    async def fail_slowly() -> None:
        nonlocal tries
        tries += 1
        await pause(0.05)
        raise RedisConnectionError("unreachable")

    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(RedisConnectionError):
        await retry_until_deadline(fail_slowly, 0.01)
    assert tries == 2
    with pytest.raises(RedisConnectionError):
        await retry_until_deadline(fail_slowly, 0.5)
    assert 2 + 4 <= tries <= 2 + 10


async def test_a_dedicated_connection_is_retried_and_used_by_all_commands(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = connect(redis_url, name="test")
    connect_once: Any = redis.connection_pool.get_connection
    n_attempts = 0

    async def connect_at_second_attempt() -> Any:
        nonlocal n_attempts
        n_attempts += 1
        if n_attempts == 1:
            raise RedisConnectionError("Redis restarts")
        return await connect_once()

    monkeypatch.setattr(redis.connection_pool, "get_connection", connect_at_second_attempt)
    async with dedicated_connection(redis) as client:
        assert len({await client.client_id() for _ in range(3)}) == 1
        assert n_attempts == 2
    assert repr(redis.connection_pool) == "<BoundedPool in_use=0 waiting=0>"
    await redis.aclose()


async def ping_alone(redis: Redis) -> None:
    """Send a command that needs a connection of its own."""
    pipe = redis.pipeline(transaction=True)
    pipe.ping()
    await pipe.execute()


async def try_ping(redis: Any) -> None:
    """Send a command that may share its connection, without a retry."""
    await redis.send(("PING",), {})


async def try_ping_alone(redis: Any) -> None:
    """Send a command that needs a connection of its own, without a retry."""
    await redis.send_pipeline([(("PING",), {})], True)


@pytest.mark.parametrize("ping", [try_ping, try_ping_alone])
async def test_a_thousand_commands_to_a_server_that_refuses_connections_fail_together(
    free_port: int, monkeypatch: pytest.MonkeyPatch, ping: Callable[[Redis], Awaitable[object]]
) -> None:
    redis = connect(f"redis://{HOST}:{free_port}/0", name="test")
    n_attempts = count_connection_attempts(redis, monkeypatch)
    failed = await asyncio.gather(*(ping(redis) for _ in range(1000)), return_exceptions=True)
    assert n_attempts() > 0
    assert n_attempts() <= 2 * MAX_CONNECTIONS, "each command has tried to connect itself"
    assert {type(error) for error in failed} == {RedisConnectionError}
    await redis.aclose()


@pytest.mark.parametrize("ping", [try_ping, try_ping_alone])
async def test_commands_that_wait_for_a_connection_fail_when_the_server_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, ping: Callable[[Redis], Awaitable[object]]
) -> None:
    with silent_listener() as port:
        redis = connect(f"redis://{HOST}:{port}/0?socket_timeout=0.4", name="test")
        n_timeouts = count_timeouts(redis, monkeypatch)
        failed = await asyncio.gather(*(ping(redis) for _ in range(500)), return_exceptions=True)
        assert n_timeouts() > 0
        assert n_timeouts() <= 2 * MAX_CONNECTIONS, "each command has waited for a timeout itself"
        assert all(isinstance(error, RedisTimeoutError | RedisConnectionError) for error in failed)
        await redis.aclose()


async def test_a_timeout_bounds_every_command_to_a_server_that_does_not_answer() -> None:
    with silent_listener() as port:
        redis = connect(f"redis://{HOST}:{port}/0?socket_timeout=600", name="test")

        async def bounded() -> None:
            async with asyncio.timeout(0.3):
                await redis.ping()

        ended = await asyncio.gather(*(bounded() for _ in range(100)), return_exceptions=True)
        assert {type(error) for error in ended} == {TimeoutError}
        async with redis.pipeline() as pipe:
            pipe.ping()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await pipe.execute()
        await redis.aclose()


async def test_a_cancelled_wait_for_a_connection_wakes_the_next_command(redis_url: str) -> None:
    redis = connect(redis_url, name="test")
    for n_turns in range(8):
        blocking: list[Any] = [asyncio.ensure_future(redis.blpop([f"none-{n_turns}"], timeout=0.05)) for _ in range(32)]
        await asyncio.sleep(0.01)
        waiting: list[Any] = [asyncio.ensure_future(redis.ping()) for _ in range(40)]
        await asyncio.wait(blocking, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(n_turns):
            await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait(waiting[::2])
            assert await asyncio.gather(*waiting[1::2]) == [True] * 20
            assert await asyncio.gather(*blocking) == [None] * 32
    await redis.aclose()


async def test_a_script_that_the_server_lost_is_loaded_again_also_in_a_pipeline(redis_url: str) -> None:
    redis = connect(redis_url, name="test")
    script = redis.register_script(f"return ARGV[1] -- {secrets.token_hex(4)}")
    assert await script(args=["one"]) == b"one"
    await redis.script_flush()
    assert await script(args=["two"]) == b"two"
    await redis.script_flush()
    async with redis.pipeline(transaction=False) as pipe:
        await script(args=["three"], client=pipe)
        pipe.echo("four")
        assert await pipe.execute() == [b"three", b"four"]
    await redis.aclose()


@contextmanager
def silent_listener() -> Iterator[int]:
    """Yield the port of a server that accepts connections and never replies."""
    with socket.create_server((HOST, 0), backlog=2000) as listener:
        port: int = listener.getsockname()[1]
        yield port


async def test_a_connection_that_is_closed_while_a_command_is_sent_raises_a_connection_error(redis_url: str) -> None:
    redis = connect(redis_url, name="test")
    connection = make_connection(redis, "")
    await connection.connect()  # type: ignore[no-untyped-call]
    connection.check_health = lambda: asyncio.sleep(0)  # type: ignore[method-assign]  # a check that waits
    sending = asyncio.create_task(connection.send_command("PING"))
    await asyncio.sleep(0)
    await connection.disconnect(nowait=True)
    with pytest.raises(RedisConnectionError, match="closed during a command"):
        await sending
    await redis.aclose()
