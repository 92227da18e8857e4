"""Sends a command to one worker and waits for the reply.

A command is pushed to a list of the worker in Redis. The worker pushes its reply to a list that only this command uses.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, TypeVar

from redis.asyncio import Redis

from llamaq.common.backoff import Backoff
from llamaq.common.errors import ResultTimeout, WorkerEnded
from llamaq.common.protocol import codec
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.common.protocol.text_commands import TextCommand, TextReply
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer.queries.queue_snapshots import read_workers
from llamaq.producer.queue_connection import QueueConnection

R = TypeVar("R", SlotReply, TextReply)

REPLY_BLOCK_S = 1.0
"""Longest duration of one BLPOP for a reply. The worker's heartbeat is checked between two BLPOPs."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.2
"""Pauses between two reads of a reply that is read without BLPOP."""
LONGEST_WAIT_S = 86_400.0
"""Longest wait for a reply. A command has a deadline, even if the timeout of its call is unlimited."""
LATE_HEARTBEAT_MS = 3000
"""A worker may have been killed if its last heartbeat is older than that of another worker by more than this time."""
LIST_TTL_MARGIN_MS = 60_000
"""The worker's list of commands expires this long after the deadline of the newest command, if no worker reads it."""


def new_command_id() -> str:
    """Return a random id."""
    return secrets.token_hex(16)


async def worker_ids(connection: QueueConnection) -> list[str]:
    """Return the ids of the live workers of the client's queue."""
    workers = await read_workers(connection, connection.settings.queue)
    return [worker.card.worker for worker in workers]


async def responsive_worker_ids(connection: QueueConnection) -> list[str]:
    """Return the ids of the live workers of the client's queue, without those that may have been killed lately."""
    workers = await read_workers(connection, connection.settings.queue)
    newest_ms = max((worker.heartbeat_ms for worker in workers), default=0)
    return [worker.card.worker for worker in workers if newest_ms - worker.heartbeat_ms <= LATE_HEARTBEAT_MS]


async def exchange(
    connection: QueueConnection,
    worker: str,
    command_list: str,
    command: SlotCommand | TextCommand,
    reply_type: type[R],
    timeout: float | None,
) -> R:
    """Send a command to a worker and return the reply. The worker ignores a command whose deadline has passed.

    Args:
        connection: The client's connection.
        worker: The id of the worker.
        command_list: Key of the worker's list for commands of this kind.
        command: The command. Its id and deadline are set here.
        reply_type: The class of the reply.
        timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

    Raises:
        WorkerEnded: The worker ended before it replied.
        ResultTimeout: The reply did not arrive in time.
    """
    redis, timeout_s = connection.redis, min(connection.timeout_s(timeout), LONGEST_WAIT_S)
    deadline_ms = await server_time_ms(redis, command_list) + int(timeout_s * 1000)
    # A command may be sent to several workers. Each gets a new id, because the id names the list for the reply.
    command = command.model_copy(update={"id": new_command_id(), "deadline_ms": deadline_ms})
    async with redis.pipeline(transaction=True) as pipe:
        pipe.rpush(command_list, codec.encode_model(command))
        pipe.pexpire(command_list, int(timeout_s * 1000) + LIST_TTL_MARGIN_MS)
        await pipe.execute()
    return codec.decode_model(reply_type, await _await_reply(connection, worker, command.id, timeout_s))


async def _await_reply(connection: QueueConnection, worker: str, command_id: str, timeout_s: float) -> bytes:
    redis, keys = connection.redis, connection.keys
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while (left_s := deadline_s - clock()) > 0:
        reply = await _pop_reply(connection, keys.reply(command_id), max(0.01, min(REPLY_BLOCK_S, left_s)))
        if reply is not None:
            return reply
        if not await redis.exists(keys.worker(worker)):
            raise WorkerEnded(f"worker {worker} ended, or its heartbeat stopped, before it replied")
    raise ResultTimeout(f"worker {worker} has not replied within {timeout_s:g} s")


async def _pop_reply(connection: QueueConnection, key: str, timeout_s: float) -> bytes | None:
    """Wait for a reply. None: there is none within the timeout.

    A BLPOP keeps a connection of the pool. If many calls wait, the others of them read at intervals instead.
    """
    redis, blocking = connection.redis, connection.blocking_reads
    found: Any
    reply: bytes | None
    if not blocking.locked():
        async with blocking:
            found = await redis.blpop([key], timeout=timeout_s)
        reply = None if found is None else found[1]
        return reply
    clock, pauses = asyncio.get_running_loop().time, Backoff(FIRST_LOOK_S, LONGEST_LOOK_S)
    deadline_s = clock() + timeout_s
    while (reply := await _lpop(redis, key)) is None and (left_s := deadline_s - clock()) > 0:  # noqa: ASYNC110  # in Redis
        await asyncio.sleep(min(left_s, pauses.next_delay_s()))
    return reply


async def _lpop(redis: Redis, key: str) -> bytes | None:
    reply: Any = await redis.lpop(key)
    return None if reply is None else bytes(reply)
