"""The client of one Redis server. It retries commands, and holds no connection between two tries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.backoff import Backoff
from llamaq.common.redis.pool import BoundedPool
from llamaq.common.redis.shared_round_trips import CLOSED, Command, SharedRoundTrips

T = TypeVar("T")

BLOCKING = ("XREAD", "XREADGROUP", "BLPOP", "WAIT")
"""Commands that may block in Redis. No other command may wait for them."""
LARGE_PIPELINE = 16
"""A pipeline with more commands has a connection of its own, so that single commands do not wait for it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""The pauses between the tries of a command."""


class RetryingRedis(Redis):
    """Sends commands to one server. While the server cannot be reached, each command is retried until a deadline.

    redis-py's own client retries while it holds a connection of the pool. With 1,000 commands and 32 connections, the
    last command would begin its retries only after those of about 30 earlier commands.

    Concurrent commands are sent together, see `SharedRoundTrips`. Commands that may block, transactions, large
    pipelines and long commands have a connection of their own.
    """

    def __init__(
        self,
        pool: BoundedPool,
        retry_s: float,
        *,
        known_scripts: dict[str, str] | None = None,
        single_connection_client: bool = False,
    ) -> None:
        """Create a client, which connects at the first command.

        Args:
            pool: The connections. The client closes them when it is closed.
            retry_s: How long a command is retried, in seconds.
            known_scripts: Maps the hash of each registered script to its text; shared by the clients of a cluster.
            single_connection_client: Whether all commands use the same connection of the pool.
        """
        super().__init__(connection_pool=pool, single_connection_client=single_connection_client)
        self.auto_close_connection_pool = not single_connection_client
        self.pool = pool
        self.known_scripts = {} if known_scripts is None else known_scripts
        self._retry_s = retry_s
        self._is_closed = False
        self._round_trips = SharedRoundTrips(pool, self.parse_response)

    async def call_with_retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`, and call again while the server cannot be reached, until the deadline.

        Raises:
            RuntimeError: This client is closed. A retry would open a connection that nothing closes.
        """

        async def call_if_open() -> T:
            if self._is_closed:
                raise RuntimeError(CLOSED)
            return await call()

        return await retry_until_deadline(call_if_open, self._retry_s)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See `Redis.execute_command`."""
        return await self.call_with_retry(lambda: self.send(args, options))

    async def send(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Send one command, without a retry."""
        is_alone = self.single_connection_client or args[0] in BLOCKING
        execute: Any = super().execute_command if is_alone else self._execute
        try:
            return await execute(*args, **options)
        except NoScriptError:
            if args[1] not in self.known_scripts:
                raise
            return await execute(*self._with_text(args), **options)
        except RedisTimeoutError as exc:
            self.pool.fail_waiting(exc)
            raise

    async def _execute(self, *args: Any, **options: Any) -> Any:
        """Send one command together with those of concurrent calls, and return or raise its reply."""
        (reply,) = await self._round_trips.send([(args, options)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def register_script(self, script: Any) -> AsyncScript:  # type: ignore[override]  # redis-py's own annotations
        """See `Redis.register_script`. A server that does not have the script gets its text when it is called."""
        registered = super().register_script(script)
        self.known_scripts[registered.sha] = script
        return registered

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:  # noqa: ARG002
        """See `Redis.pipeline`."""
        return RetryingPipeline(self, transaction)

    async def send_pipeline(self, commands: Sequence[Command], transaction: bool) -> list[Any]:
        """Send commands in one round trip, without a retry. Return the reply or the error of each command, in order."""
        is_alone = transaction or len(commands) > LARGE_PIPELINE or any(args[0] in BLOCKING for args, _ in commands)
        if is_alone:
            replies = await self._send_alone(commands, transaction)
        else:
            replies = await self._round_trips.send(commands)
        unknown = [place for place, reply in enumerate(replies) if self._is_unknown_script(commands[place], reply)]
        if unknown:
            again = self._with_texts([commands[place] for place in unknown])
            for place, reply in zip(unknown, await self.send_pipeline(again, transaction), strict=True):
                replies[place] = reply
        return replies

    async def _send_alone(self, commands: Sequence[Command], transaction: bool) -> list[Any]:
        pipe: Any = Pipeline(self.connection_pool, self.response_callbacks, transaction, None)
        for args, options in commands:
            pipe.pipeline_execute_command(*args, **options)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies

    def _is_unknown_script(self, command: Command, reply: Any) -> bool:
        """Return whether the server did not know the script of a command, and this client has its text."""
        return isinstance(reply, NoScriptError) and command[0][1] in self.known_scripts

    def _with_text(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the call of a script with its text instead of its hash. The server keeps the text for the next calls.

        `SCRIPT LOAD` would need one more round trip, and could be followed by another `SCRIPT FLUSH`.
        """
        return ("EVAL", self.known_scripts[args[1]], *args[2:])

    def _with_texts(self, commands: Sequence[Command]) -> list[Command]:
        """Return calls of scripts. The first call of each script has its text."""
        first = {args[1]: place for place, (args, _) in reversed([*enumerate(commands)])}
        return [
            (self._with_text(args) if first[args[1]] == place else args, options)
            for place, (args, options) in enumerate(commands)
        ]

    async def send_together(self, key: str, commands: Sequence[Command]) -> list[Any]:  # noqa: ARG002  # see `Cluster`
        """Send commands to the server that has the key, over one connection, without a retry."""
        return await self.send_pipeline(commands, False)

    def client(self) -> Self:
        """Return a client that sends all commands over one connection."""
        return type(self)(self.pool, self._retry_s, known_scripts=self.known_scripts, single_connection_client=True)

    async def close_connections(self) -> None:
        """Close the connections. Commands fail as after a lost connection."""
        await self._round_trips.aclose()
        await self.pool.aclose()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections. Commands without a reply fail, and so do later ones."""
        self._is_closed = True
        await self._round_trips.aclose()
        await super().aclose(close_connection_pool)

    def __repr__(self) -> str:
        return f"<RetryingRedis {self.pool!r}>"


class RetryingPipeline(Pipeline):
    """A pipeline that keeps its commands, so that all of them can be sent again. It does not support WATCH."""

    def __init__(self, owner: RetryingRedis, transaction: bool) -> None:
        super().__init__(owner.connection_pool, owner.response_callbacks, transaction, None)
        self._owner = owner

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send all commands, and return their replies in order.

        Args:
            raise_on_error: Whether the first error of a command is raised. Otherwise it is the reply to its command.
        """
        commands, self.command_stack = list(self.command_stack), []
        for script in self.scripts:
            self._owner.known_scripts[script.sha] = str(script.script)
        self.scripts = set()
        if not commands:
            return []
        owner, is_transaction = self._owner, bool(self.is_transaction)
        replies = await owner.call_with_retry(lambda: owner.send_pipeline(commands, is_transaction))
        if raise_on_error:
            self.raise_first_error(commands, replies)
        return replies


async def retry_until_deadline(call: Callable[[], Awaitable[T]], longest_s: float) -> T:
    """Return the result of `call`. While the server cannot be reached, call again, with growing pauses.

    The deadline is `longest_s` seconds after the first failure, whether the server refuses connections or does not
    reply. There is at least one retry, because the first failure may only mean that an idle connection was broken.

    The call must not keep a connection of a pool between two tries, see `RetryingRedis`.

    Raises:
        RedisError: The error of the last try.
    """
    clock = asyncio.get_running_loop().time
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    deadline_s: float | None = None
    while True:
        try:
            return await call()
        except (RedisConnectionError, RedisTimeoutError):
            if deadline_s is None:
                deadline_s = clock() + longest_s
            elif clock() >= deadline_s:
                raise
        await asyncio.sleep(backoff.next_delay_s())
