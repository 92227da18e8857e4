"""Concurrent commands share round trips and connections, but not their errors and cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tests.support.loop_clock import advance_loop_clock
from tests.support.ports import HOST, reserve_port
from tests.support.redis_timeouts import count_timeouts
from tests.support.tcp_proxy import Proxy

from llamaq.common.redis import connect as connect_module
from llamaq.common.redis import shared_round_trips
from llamaq.common.redis.connect import MAX_CONNECTIONS, connect
from llamaq.common.redis.shared_round_trips import MAX_BYTES, MAX_COMMANDS, MAX_ROUND_TRIPS

SLOW = """
    local os = rawget(_G, 'os')
    local clock = os and os.clock or function() return redis.call('TIME')[1] + 0 end
    local until_s = clock() + ARGV[1]
    while clock() < until_s do end
    return ARGV[1]
"""
"""A script that keeps Redis busy for the given number of seconds, or up to one second less.

From Redis 7 on, `TIME` stands still in a script, but there is `os.clock`.
"""


def client(url: str) -> Any:
    """Return a client, to be used in an `async with` block."""
    return connect(url, name="test-shared")


async def n_connections(redis: Redis) -> int:
    return len([one for one in await redis.client_list() if one["name"] == "test-shared"])


def count_reads(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the reads of replies that have begun, so that their timeouts run. Returns a function for the count."""
    n_reads = 0
    kind: Any = redis.connection_pool.connection_class  # a class of its own for each client
    read = kind.read_response

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_reads
        n_reads += 1
        return read(*args, **options)

    monkeypatch.setattr(kind, "read_response", counted)
    return lambda: n_reads


def movable_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that moves the clock of the event loop. It also moves the clock of calls that have begun."""
    loop = asyncio.get_running_loop()
    earlier, moved_s = loop.time, 0.0

    def move(seconds: float) -> None:
        nonlocal moved_s
        moved_s += seconds

    monkeypatch.setattr(loop, "time", lambda: earlier() + moved_s)
    return move


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0)


async def until_blocked(redis_url: str, n_commands: int = 1, earlier: frozenset[str] = frozenset()) -> frozenset[str]:
    """Wait until commands of a client block in Redis. Return the ids of their connections, none of which is earlier."""
    async with connect(redis_url, name="test-observer") as redis:
        while True:
            connections = await redis.client_list()
            blocked = {one["id"] for one in connections if one["name"] == "test-shared" and "b" in one["flags"]}
            if len(blocked - earlier) == n_commands:
                return frozenset(blocked)
            await asyncio.sleep(0.01)


async def test_concurrent_commands_use_one_connection_and_get_their_own_replies(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_round_trips, "CONNECT_AFTER_S", 60)  # a busy machine has no influence
    async with client(redis_url) as redis:
        keys = [f"{queue}:{number}" for number in range(90)]
        await asyncio.gather(*(redis.set(key, key) for key in keys))
        assert await asyncio.gather(*(redis.get(key) for key in keys)) == [key.encode() for key in keys]
        assert await n_connections(redis) == 1
        await asyncio.gather(*(redis.delete(key) for key in keys))


async def test_calls_do_not_wait_long_for_a_connection_that_is_in_use(redis_url: str) -> None:
    with Proxy(redis_url) as proxy:
        redis = client(f"{proxy.url}?socket_timeout=60")
        await redis.ping()
        proxy.silence()  # it has no influence on a connection that is opened later
        first = asyncio.ensure_future(redis.echo("first"))
        await asyncio.sleep(0)
        assert list(await asyncio.gather(redis.echo("a"), redis.echo("b"))) == [b"a", b"b"]
        assert not first.done()
        first.cancel()
        await redis.aclose()


async def test_a_cancelled_call_does_not_keep_others_waiting_for_its_connection(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_round_trips, "CONNECT_AFTER_S", 60)
    with Proxy(redis_url) as proxy:
        redis = client(f"{proxy.url}?socket_timeout=600")
        await redis.ping()
        proxy.silence()
        first, second, third = (asyncio.ensure_future(redis.echo(word)) for word in ("first", "second", "third"))
        for _ in range(3):
            await asyncio.sleep(0)
        second.cancel()  # the others wait as long as it has waited
        advance_loop_clock(monkeypatch, 60)
        assert await third == b"third"
        first.cancel()
        await redis.aclose()


async def test_thousands_of_commands_use_a_few_connections(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_round_trips, "LONGEST_WAIT_S", 60)  # a busy machine has no influence
    async with client(redis_url) as redis:
        assert await asyncio.gather(*(redis.echo(str(number)) for number in range(3000))) == [
            str(number).encode() for number in range(3000)
        ]
        assert await n_connections(redis) <= MAX_ROUND_TRIPS < MAX_CONNECTIONS


async def test_an_event_loop_that_stands_still_opens_no_connections(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_round_trips, "LONGEST_WAIT_S", 10)
    many = MAX_COMMANDS * (MAX_ROUND_TRIPS + 4)
    async with client(f"{redis_url}?socket_timeout=600&health_check_interval=0") as redis:
        await asyncio.gather(*(redis.echo("x") for _ in range(many)))  # opens the connections
        for n_turns in range(1, 9):
            calls = [asyncio.ensure_future(redis.echo("x")) for _ in range(many)]
            for _ in range(n_turns):
                await asyncio.sleep(0)
            advance_loop_clock(monkeypatch, 10.1)  # maybe within a round trip
            await asyncio.gather(*calls)
        assert await n_connections(redis) <= MAX_ROUND_TRIPS


async def test_commands_that_follow_each_other_are_sent_one_by_one(redis_url: str) -> None:
    async with client(redis_url) as redis:
        assert [await redis.echo(str(number)) for number in range(10)] == [str(number).encode() for number in range(10)]
        assert await n_connections(redis) == 1


async def test_the_commands_of_a_pipeline_stay_together_and_in_order(redis_url: str, queue: str) -> None:
    async with client(redis_url) as redis:

        async def count_up(key: str) -> list[int]:
            async with redis.pipeline(transaction=False) as pipe:
                for _ in range(7):
                    pipe.incr(key)
                replies: list[int] = await pipe.execute()
                return replies

        keys = [f"{queue}:{number}" for number in range(60)]
        for replies in await asyncio.gather(*map(count_up, keys)):
            assert replies == [1, 2, 3, 4, 5, 6, 7]
        await redis.delete(*keys)


async def test_an_error_reply_fails_only_its_own_command(redis_url: str, queue: str) -> None:
    async with client(redis_url) as redis:
        await redis.set(queue, "text")
        calls = redis.get(queue), redis.incr(queue), redis.get(queue)
        replies: list[Any] = list(await asyncio.gather(*calls, return_exceptions=True))
        assert (replies[0], replies[2]) == (b"text", b"text")
        assert isinstance(replies[1], ResponseError)
        await redis.delete(queue)


async def test_an_argument_that_cannot_be_sent_fails_only_its_own_command(redis_url: str) -> None:
    async with client(redis_url) as redis:
        wrong: Any = object()
        calls = redis.echo("a"), redis.echo(wrong), redis.echo("b")
        replies: list[Any] = list(await asyncio.gather(*calls, return_exceptions=True))
        assert (replies[0], replies[2]) == (b"a", b"b")
        assert isinstance(replies[1], DataError)


async def test_a_cancelled_command_does_not_affect_those_that_are_sent_with_it(redis_url: str) -> None:
    async with client(redis_url) as redis:
        for turns in range(30):
            tasks = [asyncio.ensure_future(redis.echo(str(number))) for number in range(4)]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[2].cancel()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
            assert replies[1::2] == [b"1", b"3"]
        assert await n_connections(redis) <= MAX_ROUND_TRIPS


async def test_a_command_that_blocks_does_not_delay_others(redis_url: str, queue: str) -> None:
    async with client(redis_url) as redis:
        waiting = asyncio.ensure_future(redis.blpop([queue], timeout=20))
        beside = list(await asyncio.gather(redis.echo("a"), redis.echo("b")))
        assert beside == [b"a", b"b"]
        assert not waiting.done()
        await redis.rpush(queue, "value")
        assert list(await waiting) == [queue.encode(), b"value"]


async def test_short_commands_do_not_wait_until_all_long_ones_are_sent(redis_url: str) -> None:
    async with client(redis_url) as redis:
        long = "x" * (2 * MAX_BYTES)
        replies = await asyncio.gather(*(redis.echo(long) for _ in range(10)), redis.echo("short"))
        assert replies == [*[long.encode()] * 10, b"short"]
        assert await n_connections(redis) > 1


async def test_a_lost_connection_fails_all_calls_without_a_reply(redis_url: str, queue: str) -> None:
    with Proxy(redis_url) as proxy:
        redis = client(proxy.url)
        await redis.ping()
        commands = [("ECHO", "before"), ("BRPOP", queue, 0), ("ECHO", "behind")]
        calls = [asyncio.ensure_future(redis.send(command, {})) for command in commands]
        assert await calls[0] == b"before"
        await until_blocked(redis_url)
        assert not calls[2].done(), "it waits behind the command that blocks"
        proxy.cut()
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert replies[0] == b"before", "it was sent at once, over another connection"
        assert {type(reply) for reply in replies[1:]} == {RedisConnectionError}
        assert len({id(reply) for reply in replies}) == len(commands)  # each has its own traceback
        assert await redis.send(("ECHO", "after"), {}) == b"after"
        await redis.aclose()


@pytest.mark.parametrize(
    ("name", "value", "usual"),
    [("proto-max-bulk-len", 2**20, 2**29), ("min-replicas-to-write", 1, 0)],
    ids=["too long", "refused"],
)
async def test_a_command_for_which_the_connection_is_lost_does_not_fail_those_that_are_sent_with_it(
    redis_url: str, queue: str, name: str, value: int, usual: int
) -> None:
    async with client(redis_url) as redis:
        await redis.config_set(name, value)
        try:
            calls = redis.echo("a"), redis.set(queue, "x" * (value + 1), ex=9), redis.echo("b"), redis.echo("c")
            replies: list[Any] = list(await asyncio.gather(*calls, return_exceptions=True))
        finally:
            await redis.config_set(name, usual)
        assert [replies[0], *replies[2:]] == [b"a", b"b", b"c"]
        assert isinstance(replies[1], RedisConnectionError)


async def test_a_reply_that_is_not_read_in_time_does_not_fail_the_calls_of_its_round_trip(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect_module, "RETRY_S", 20)
    move_clock = movable_clock(monkeypatch)
    async with client(f"{redis_url}?socket_timeout=40") as redis:
        # A command that never ends stands for a reply that is too long for the connection.
        commands = redis.echo("a"), redis.execute_command("BRPOP", queue, 0), redis.echo("b")
        calls = [asyncio.ensure_future(command) for command in commands]
        assert await calls[0] == b"a"
        first_try = await until_blocked(redis_url)
        assert not calls[2].done(), "it waits behind the command that blocks"
        move_clock(40)
        assert await calls[2] == b"b"
        await until_blocked(redis_url, earlier=first_try)
        move_clock(40)
        with pytest.raises(RedisTimeoutError):
            await calls[1]


async def test_replies_that_are_not_read_in_time_do_not_fail_the_calls_that_wait(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect_module, "RETRY_S", 20)
    move_clock = movable_clock(monkeypatch)
    async with client(f"{redis_url}?socket_timeout=40") as redis:
        slow = []
        for number in range(2 * MAX_ROUND_TRIPS):
            slow.append(asyncio.ensure_future(redis.execute_command("BRPOP", f"{queue}:{number}", 0)))
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*(redis.echo(str(number)) for number in range(20))) == [
            str(number).encode() for number in range(20)
        ]
        first_try = await until_blocked(redis_url, len(slow))
        assert not any(call.done() for call in slow)
        move_clock(40)
        await until_blocked(redis_url, len(slow), earlier=first_try)
        move_clock(40)
        for reply in await asyncio.gather(*slow, return_exceptions=True):
            assert isinstance(reply, RedisTimeoutError)


async def test_calls_do_not_wait_until_the_long_replies_of_others_are_read(redis_url: str, queue: str) -> None:
    async with client(f"{redis_url}?socket_timeout=600") as redis:
        slow = []
        for _ in range(MAX_ROUND_TRIPS):
            slow.append(asyncio.ensure_future(redis.execute_command("BRPOP", queue, 0)))  # no reply ever arrives
            await asyncio.sleep(0.05)
        await asyncio.gather(*(redis.ping() for _ in range(20)))
        for call in slow:
            call.cancel()


async def test_a_call_does_not_wait_for_many_long_replies_of_its_round_trip(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect_module, "RETRY_S", 20)  # a busy machine has no influence
    async with client(f"{redis_url}?socket_timeout=2") as redis:
        slow = [asyncio.ensure_future(redis.execute_command("BRPOP", f"{queue}:{each}", 1)) for each in range(60)]
        last = asyncio.ensure_future(redis.ping())
        async with asyncio.timeout(30):  # one after the other, the replies take a minute
            await last
            assert await asyncio.gather(*slow) == [None] * len(slow)


async def test_after_a_timeout_of_a_round_trip_older_connections_reconnect(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(redis_url) as proxy:
        redis = client(f"{proxy.url}?socket_timeout=60")
        await asyncio.gather(*(redis.pipeline(transaction=True).ping().execute() for _ in range(6)))
        assert proxy.silence() > 3
        n_reads, n_timeouts = count_reads(redis, monkeypatch), count_timeouts(redis, monkeypatch)
        pings = [asyncio.ensure_future(redis.ping()) for _ in range(2)]
        await until(lambda: n_reads() == len(pings))
        advance_loop_clock(monkeypatch, 60)
        await asyncio.gather(*pings)
        await asyncio.gather(*(redis.ping() for _ in range(6)))
        assert n_timeouts() > 0
        assert n_timeouts() <= 2, "one for each silent connection"
        await redis.aclose()


async def test_long_commands_have_connections_of_their_own(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_round_trips, "CONNECT_AFTER_S", 0)
    monkeypatch.setattr(shared_round_trips, "LONGEST_WAIT_S", 600)
    async with client(f"{redis_url}?socket_timeout=600") as redis:
        await redis.ping()
        long_keys = [f"{queue}:{number}" + "x" * MAX_BYTES for number in range(MAX_ROUND_TRIPS)]
        long_commands = [asyncio.ensure_future(redis.execute_command("BRPOP", key, 0)) for key in long_keys]
        replies: list[Any] = list(await asyncio.gather(redis.echo("a"), redis.echo("b")))
        assert replies == [b"a", b"b"]
        assert await n_connections(redis) == len(long_commands) + 1
        for key, command in zip(long_keys, long_commands, strict=True):
            assert not command.done()
            await redis.rpush(key, "value")
            assert list(await command) == [key.encode(), b"value"]


async def test_after_a_failed_round_trip_calls_share_round_trips_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_round_trips, "SEPARATE_S", 0.2)
    with Proxy(redis_url) as proxy:
        redis = client(proxy.url)
        await redis.ping()
        calls = [asyncio.ensure_future(redis.eval(SLOW, 0, 2)), asyncio.ensure_future(redis.ping())]
        await asyncio.sleep(0.1)
        proxy.cut()
        await asyncio.gather(*calls)
        await asyncio.sleep(0.2)
        await redis.connection_pool.disconnect()
        await asyncio.gather(*(redis.ping() for _ in range(50)))
        assert await n_connections(redis) == 2
        await redis.aclose()


async def test_commands_are_retried_after_a_lost_connection(redis_url: str) -> None:
    with Proxy(redis_url) as proxy:
        redis = client(proxy.url)
        await redis.ping()
        for _ in range(3):
            proxy.cut()
            replies = await asyncio.gather(*(redis.echo(str(number)) for number in range(20)))
            assert replies == [str(number).encode() for number in range(20)]
        await redis.aclose()


@pytest.mark.parametrize("n_commands", [1, 50])
async def test_when_the_server_does_not_answer_all_calls_of_a_round_trip_fail(
    redis_url: str, n_commands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_round_trips, "CONNECT_AFTER_S", 0)  # two connections are opened before the silence
    with Proxy(redis_url) as proxy:
        redis = client(f"{proxy.url}?socket_timeout=60")
        await asyncio.gather(redis.ping(), redis.ping(), redis.ping())
        proxy.silence()
        n_reads = count_reads(redis, monkeypatch)
        calls = [asyncio.ensure_future(redis.send(("ECHO", "text"), {})) for _ in range(n_commands)]
        await until(lambda: n_reads() == min(n_commands, 2))
        advance_loop_clock(monkeypatch, 60)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(reply) for reply in replies} == {RedisTimeoutError}
        assert await redis.send(("ECHO", "after"), {}) == b"after"
        await redis.aclose()


@pytest.mark.parametrize("n_commands", [1, 200])
async def test_when_no_connection_can_be_opened_every_call_has_the_error(n_commands: int) -> None:
    redis = client(f"redis://{HOST}:{reserve_port()}")
    replies = await asyncio.gather(*(redis.send(("PING",), {}) for _ in range(n_commands)), return_exceptions=True)
    assert {type(reply) for reply in replies} == {RedisConnectionError}
    assert len({id(reply) for reply in replies}) == n_commands  # each has its own traceback
    await redis.aclose()


async def test_a_closed_client_leaves_no_call_waiting(redis_url: str, queue: str) -> None:
    redis = client(redis_url)
    await redis.ping()
    running = [asyncio.ensure_future(redis.send(("BRPOP", queue, 0), {})) for _ in range(2)]
    await until_blocked(redis_url)
    await redis.aclose()
    for reply in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(reply, RedisError)
