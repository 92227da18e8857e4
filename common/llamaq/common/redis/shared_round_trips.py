"""Sends the commands of concurrent calls in one round trip."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.redis.pool import BoundedPool

Command = tuple[tuple[Any, ...], Mapping[str, Any]]
"""A command: its words, and options for parsing the reply."""

CLOSED = "this client was closed during the call"
MAX_ROUND_TRIPS = 4
"""Largest number of round trips at the same time, each over a connection of its own. While a long reply is read over
one of them, the other commands use the others."""
MAX_COMMANDS = 100
"""Largest number of commands in one round trip, if they come from several calls."""
MAX_BYTES = 64 * 2**10
"""No call is added to a round trip that already has more bytes to send. Otherwise a short command would wait until the
long prompts of other calls are sent. A call with more bytes has a connection of its own."""
CONNECT_AFTER_S = 0.002
"""How long calls wait for a connection that is in use before another one is opened. A round trip on the same machine or
in the same data center takes less time than to open a connection."""
LONGEST_WAIT_S = 0.25
"""If no round trip ends within this time, long replies are being read. Then each waiting call gets a connection of its
own."""
N_WAITS = 5
"""Number of parts in which the wait is timed. While the event loop stands still, because the machine is busy, only one
part passes. Replies that have arrived meanwhile are read before the next one."""
SEPARATE_S = 2.0
"""How long each call has a connection of its own after a round trip of several calls has failed, or a wait was too
long. Longer than the pause before the next try of a call: calls that failed together are retried together, and would
fail again if the command of one of them is the reason."""


@dataclass(eq=False, slots=True)
class Call:
    """The commands of one call. They are sent one behind the other over the same connection."""

    commands: Sequence[Command]
    replies: asyncio.Future[list[Any] | None]
    """The reply or the error of each command, in order. None: the call sends its commands itself, which needs no task,
    because no other call waits or because calls share no round trips now."""

    def fail(self, error: Exception) -> None:
        """Raise the error in the call, unless it has ended."""
        if not self.replies.done():
            # Other calls raise the same error, and each `raise` changes its traceback.
            is_shared = isinstance(error, RedisConnectionError | RedisTimeoutError)
            self.replies.set_exception(type(error)(*error.args) if is_shared else error)


class SharedRoundTrips:
    """Sends the commands of concurrent calls together, so that each of them does not need a connection of its own.

    To open a connection takes as long as dozens of commands. A call is sent at once if no other is in progress.
    Otherwise calls in the same iteration of the event loop form one round trip. So do all calls that arrive while no
    connection is free: for up to `CONNECT_AFTER_S`, while another one is opened, or while `MAX_ROUND_TRIPS` others are
    in progress.

    A call that is cancelled does not affect the other calls of its round trip. When the connection is lost, each call
    without a reply raises the error. When the server cannot be reached or does not answer in time, the calls that wait
    for a round trip raise the error too. The connection may be lost because of one command: Redis refuses a write, or
    limits the size of a command or a reply. So calls share no round trips for `SEPARATE_S` after such an error, or
    after a wait of `LONGEST_WAIT_S`.

    Args:
        pool: The connections.
        read_reply: Reads and returns the reply to one command, given the connection, and the name and the options of
            the command.
    """

    def __init__(self, pool: BoundedPool, read_reply: Callable[..., Awaitable[Any]]) -> None:
        self._pool = pool
        self._read_reply = read_reply
        self._waiting: deque[Call] = deque()
        self._n_alone = 0
        """Number of round trips for a single call."""
        self._shared = BackgroundTasks()
        """The round trips for several calls."""
        self._separate_until_s = 0.0

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands, without a retry. Return the reply or the error of each command, in order.

        The commands must not block in Redis: the commands of other calls would wait for their replies.

        Raises:
            RedisError: The server cannot be reached, has not answered in time, or the client was closed.
        """
        if not self._n_in_progress and not self._waiting:
            return await self._send_alone(commands)
        loop = asyncio.get_running_loop()
        if loop.time() < self._separate_until_s or _n_bytes(commands) > MAX_BYTES:
            return await self._send_separately(commands)
        call = Call(commands, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            loop.call_soon(self._begin)
        replies = await call.replies
        return await self._send_alone(commands) if replies is None else replies

    async def aclose(self) -> None:
        """Let all calls raise an error."""
        self._fail_waiting(RedisConnectionError(CLOSED))
        await self._shared.cancel()

    def _begin(self, *, may_connect: bool = False) -> None:
        """Start a round trip for the waiting calls, unless too many are in progress.

        Args:
            may_connect: Whether a connection may be opened although another one may soon be free.
        """
        while self._waiting and self._waiting[0].replies.done():  # it was cancelled
            self._waiting.popleft()
        if not self._waiting:
            return
        if self._n_in_progress >= MAX_ROUND_TRIPS:
            self._time_wait(self._waiting[0])
        elif self._n_in_progress and not (may_connect or self._pool.has_idle_connection):
            asyncio.get_running_loop().call_later(CONNECT_AFTER_S, self._connect_for, self._waiting[0])
        elif len(self._waiting) == 1:
            self._waiting.popleft().replies.set_result(None)
        else:
            self._shared.start(self._send_waiting()).add_done_callback(lambda _: self._begin())

    def _connect_for(self, first: Call) -> None:
        """Open a connection if `first` is still the first waiting call."""
        if self._waiting and self._waiting[0] is first:
            self._begin(may_connect=True)

    def _time_wait(self, first: Call, n_over: int = 0) -> None:
        """Send the waiting calls separately if `first` is still the first of them at the end of the longest wait.

        Args:
            first: The first waiting call when the wait began.
            n_over: Number of parts of the wait that are over.
        """
        if not self._waiting or self._waiting[0] is not first:
            return
        if n_over == N_WAITS:
            self._separate()
        else:
            asyncio.get_running_loop().call_later(LONGEST_WAIT_S / N_WAITS, self._time_wait, first, n_over + 1)

    @property
    def _n_in_progress(self) -> int:
        return self._n_alone + len(self._shared)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Lend a connection for one round trip. If the server does not answer, the waiting calls fail too. Their next
        tries share no round trips, because maybe only a reply is too long.
        """
        try:
            connection: Any = await self._pool.get_connection()
        except Exception as exc:
            self._fail_waiting(exc)
            raise
        try:
            yield connection
        except RedisTimeoutError as exc:
            self._fail_waiting(exc)
            self._separate()
            raise
        finally:
            await self._pool.release(connection)

    async def _send_separately(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands of one call, however many round trips are in progress."""
        async with self._connection() as connection:
            await connection.send_packed_command(connection.pack_commands([args for args, _ in commands]))
            return await self._replies(connection, commands)

    async def _send_alone(self, commands: Sequence[Command]) -> list[Any]:
        self._n_alone += 1
        try:
            return await self._send_separately(commands)
        finally:
            self._n_alone -= 1
            self._begin()

    async def _send_waiting(self) -> None:
        calls: list[Call] = []
        error: Exception = RedisConnectionError(CLOSED)
        try:
            async with self._connection() as connection:
                calls, packed = self._take(connection)
                self._begin()  # another round trip, for the calls that this one does not contain
                if packed:
                    await connection.send_packed_command(packed)
                await self._read_all(connection, calls)
        except Exception as exc:  # noqa: BLE001 - the calls raise it
            error = exc
            if len(calls) > 1:
                self._separate()
        finally:
            for call in calls:
                call.fail(error)

    def _take(self, connection: Any) -> tuple[list[Call], list[bytes]]:
        """Return the calls of the next round trip, and their commands as they are sent."""
        calls: list[Call] = []
        packed: list[bytes] = []
        n_commands = n_bytes = 0
        while self._waiting and n_commands < MAX_COMMANDS and n_bytes < MAX_BYTES:
            call = self._waiting.popleft()
            if call.replies.done():  # it was cancelled
                continue
            try:
                chunks = connection.pack_commands([args for args, _ in call.commands])
            except Exception as exc:  # noqa: BLE001 - only this call has a wrong argument
                call.fail(exc)
                continue
            calls.append(call)
            packed += chunks
            n_commands += len(call.commands)
            n_bytes += sum(map(len, chunks))
        return calls, packed

    async def _read_all(self, connection: Any, calls: Sequence[Call]) -> None:
        """Read the replies to calls. All together may take as long as the reply to one call that is sent separately."""
        try:
            async with asyncio.timeout(connection.socket_timeout):
                for call in calls:
                    replies = await self._replies(connection, call.commands)
                    if not call.replies.done():
                        call.replies.set_result(replies)
        except TimeoutError as exc:
            connection.note_timeout()
            raise RedisTimeoutError("the replies to several calls could not be read in time") from exc

    async def _replies(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        """Read the replies to commands. The error of one command is its reply."""
        replies: list[Any] = []
        for args, options in commands:
            try:
                replies.append(await self._read_reply(connection, args[0], **options))
            except (RedisConnectionError, RedisTimeoutError):
                raise
            except Exception as exc:  # noqa: BLE001 - the caller raises it
                replies.append(exc)
        return replies

    def _separate(self) -> None:
        """Give each call a connection of its own for a while, also the calls that wait."""
        self._separate_until_s = asyncio.get_running_loop().time() + SEPARATE_S
        while self._waiting:
            call = self._waiting.popleft()
            if not call.replies.done():
                call.replies.set_result(None)

    def _fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft().fail(error)

    def __repr__(self) -> str:
        return f"<SharedRoundTrips in_progress={self._n_in_progress} waiting={len(self._waiting)}>"


def _n_bytes(commands: Sequence[Command]) -> int:
    """Return about how many bytes are sent for commands."""
    return sum(len(word) for args, _ in commands for word in args if isinstance(word, str | bytes | bytearray))
