"""The inbox for slot commands: one Redis list for each worker, and one list for each reply.

A command is removed from the list before it is executed, so it is executed at most once. A client that gets no reply
sends its command again. A command that fails does not end the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.errors import InvalidRequest, ProtocolError, SlotCommandRefused
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.common.redis.connect import dedicated_connection
from llamaq.common.redis.server_time import server_time_ms

log = logging.getLogger(__name__)

BLOCK_S = 2.0
"""Seconds that one BLPOP waits for a command. It must be shorter than the socket timeout of the connection."""
RETRY_S = 1.0
MAX_COMMAND_BYTES = 4096
REPLY_TTL_S = 60
N_REMEMBERED_IDS = 64
"""Number of recent command ids that are stored to drop duplicates. redis-py sends a command again when a
connection breaks."""


class CommandHandler(Protocol):
    """Executes slot commands."""

    async def execute(self, command: SlotCommand) -> SlotReply:
        """Execute the command and return the reply.

        Raises:
            SlotCommandRefused: The worker cannot execute the command now.
            InvalidRequest: The command is invalid.
        """


class CommandInbox:
    """Receives the slot commands of one worker, executes them one after the other, and sends the replies."""

    def __init__(self, redis: Redis, keys: Keys, worker_id: str, handler: CommandHandler) -> None:
        self._redis = redis
        self._keys = keys
        self._key = keys.slot_commands(worker_id)
        self._handler = handler
        self._seen_ids: deque[str] = deque(maxlen=N_REMEMBERED_IDS)

    async def run(self) -> None:
        """Receive and answer commands until cancelled."""
        while True:
            try:
                async with dedicated_connection(self._redis) as connection:
                    while True:
                        received: Any = await connection.blpop([self._key], timeout=BLOCK_S)
                        if received is not None:
                            await self._answer(received[1])
            except RedisError as exc:
                log.warning("slot_commands.redis_error error=%r", exc)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("slot_commands.failed")  # a defect here must not end the worker
                await asyncio.sleep(RETRY_S)

    async def _answer(self, data: bytes) -> None:
        """Execute the encoded command and send its reply. Drop an invalid, expired or repeated command."""
        command = await self._accept(data)
        if command is None:
            return
        started_s = time.monotonic()
        reply = await self._execute(command)
        log.info(
            "slot_command.done action=%s slot=%s name=%s seconds=%.3f error=%s",
            command.action.value,
            command.slot,
            command.name,
            time.monotonic() - started_s,
            reply.error,
        )
        key = self._keys.reply(command.id)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.rpush(key, codec.encode_model(reply))
            pipe.expire(key, REPLY_TTL_S)
            await pipe.execute()

    async def _accept(self, data: bytes) -> SlotCommand | None:
        """Decode a command. Returns None if the command must be dropped. Raises `RedisError`."""
        try:
            command = codec.decode_model(SlotCommand, data, MAX_COMMAND_BYTES)
        except ProtocolError as exc:
            log.warning("slot_command.dropped error=%s", exc)
            return None
        if command.deadline_ms < await server_time_ms(self._redis):
            log.info("slot_command.expired action=%s", command.action.value)
            return None
        if command.id in self._seen_ids:
            return None
        self._seen_ids.append(command.id)
        return command

    async def _execute(self, command: SlotCommand) -> SlotReply:
        """Execute a command. Every failure becomes a reply with an error."""
        try:
            return await self._handler.execute(command)
        except (SlotCommandRefused, InvalidRequest) as exc:
            return SlotReply(error=str(exc))
        except OSError as exc:
            return SlotReply(error=f"the disk (--cache-dir): {exc.strerror or exc}")
        except Exception:  # a defect here must not end the worker
            log.exception("slot_command.failed action=%s", command.action.value)
            return SlotReply(error="a defect of the worker: the traceback is in the log of the worker")

    def __repr__(self) -> str:
        return f"<CommandInbox {self._key}>"
