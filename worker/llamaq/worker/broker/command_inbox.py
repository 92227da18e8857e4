"""The inbox for commands of clients: one Redis list for each worker and kind, and one list for each reply.

A command is removed from the list before it is executed, so it is executed at most once. A client that gets no reply
sends its command again. A command that fails does not end the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.errors import InvalidRequest, ProtocolError, SlotCommandRefused
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.common.protocol.text_commands import TextCommand, TextReply
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.server_state import server_time_ms
from llamaq.worker.broker.dedicated_connection import dedicated_connection

log = logging.getLogger(__name__)

BLOCK_S = 2.0
"""Seconds that one BLPOP waits for a command. It must be shorter than the socket timeout of the connection."""
RETRY_S = 1.0
MAX_SLOT_COMMAND_BYTES = 4096
REPLY_TTL_S = 60
N_REMEMBERED_IDS = 64
"""Number of recent command ids that are stored to drop duplicates. redis-py sends a command again when a
connection breaks."""


Command = SlotCommand | TextCommand
Reply = SlotReply | TextReply


@dataclass(frozen=True, slots=True)
class CommandKind:
    """A kind of command, with a list of its own for each worker."""

    name: str
    """The name in the log."""
    command: type[Command]
    reply: type[Reply]
    list_of: Callable[[Keys, str], str]
    """Returns the key of a worker's list."""


SLOT_COMMANDS = CommandKind("slot_command", SlotCommand, SlotReply, Keys.slot_commands)
TEXT_COMMANDS = CommandKind("text_command", TextCommand, TextReply, Keys.text_commands)


class CommandHandler(Protocol):
    """Executes the commands of one kind."""

    async def execute(self, command: Any) -> Reply:
        """Execute the command and return the reply.

        Raises:
            SlotCommandRefused: The worker cannot execute the command now.
            InvalidRequest: The command is invalid.
        """


class CommandInbox:
    """Receives one worker's commands of one kind, executes them one after the other, and sends the replies."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker_id: str,
        handler: CommandHandler,
        kind: CommandKind = SLOT_COMMANDS,
        *,
        max_bytes: int = MAX_SLOT_COMMAND_BYTES,
    ) -> None:
        """Create the inbox. A command of more than `max_bytes` is dropped."""
        self._redis = redis
        self._keys = keys
        self._kind = kind
        self._key = kind.list_of(keys, worker_id)
        self._max_bytes = max_bytes
        self._handler = handler
        self._seen_ids: deque[str] = deque(maxlen=N_REMEMBERED_IDS)

    async def run(self) -> None:
        """Receive and answer commands until cancelled."""
        outage = OutageLog(log, self._kind.name)
        while True:
            try:
                async with dedicated_connection(self._redis) as connection:
                    while True:
                        received: Any = await connection.blpop([self._key], timeout=BLOCK_S)
                        outage.record_success()
                        if received is not None:
                            await self._answer(received[1])
            except RedisError as exc:
                outage.record_failure(exc)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("%s.inbox_failed", self._kind.name)  # a defect here must not end the worker
                await asyncio.sleep(RETRY_S)

    async def _answer(self, data: bytes) -> None:
        """Execute the encoded command and send its reply. Drop an invalid, expired or repeated command."""
        command = await self._accept(data)
        if command is None:
            return
        started_s = time.monotonic()
        reply = await self._execute(command)
        log.info(
            "%s.done action=%s %sseconds=%.3f error=%s",
            self._kind.name,
            command.action.value,
            f"slot={command.slot} name={command.name} " if isinstance(command, SlotCommand) else "",
            time.monotonic() - started_s,
            reply.error if isinstance(reply, SlotReply) else reply.error is not None,  # no texts of users in the log
        )
        key = self._keys.reply(command.id)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(key, codec.encode_model(reply))
            pipe.expire(key, REPLY_TTL_S)
            await pipe.execute()

    async def _accept(self, data: bytes) -> Command | None:
        """Decode a command. Returns None if the command must be dropped. Raises `RedisError`."""
        try:
            command: Command = codec.decode_model(self._kind.command, data, self._max_bytes)
        except ProtocolError as exc:
            log.warning("%s.dropped error=%s", self._kind.name, exc)
            return None
        if command.deadline_ms < await server_time_ms(self._redis, self._key):
            log.info("%s.expired action=%s", self._kind.name, command.action.value)
            return None
        if command.id in self._seen_ids:
            return None
        self._seen_ids.append(command.id)
        return command

    async def _execute(self, command: Command) -> Reply:
        """Execute a command. Every failure becomes a reply with an error."""
        try:
            return await self._handler.execute(command)
        except (SlotCommandRefused, InvalidRequest) as exc:
            return self._kind.reply(error=str(exc))
        except OSError as exc:
            return self._kind.reply(error=f"the disk (--cache-dir): {exc.strerror or exc}")
        except Exception:  # a defect here must not end the worker
            log.exception("%s.failed action=%s", self._kind.name, command.action.value)
            return self._kind.reply(error="a defect of the worker: the traceback is in the log of the worker")

    def __repr__(self) -> str:
        return f"<CommandInbox {self._key}>"
