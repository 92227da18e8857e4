"""Commands to a worker about its slots: list, save, restore and erase.

A command is pushed to the worker's list in Redis. The worker pushes its reply to a list that only this command uses.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from pydantic import ValidationError

from llamaq.common.errors import InvalidRequest, NoWorker, ResultTimeout, SlotCommandRefused
from llamaq.common.protocol import codec
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotReply, WorkerSlots
from llamaq.common.redis.server_time import server_time_ms
from llamaq.producer.queries.queue_snapshots import read_workers
from llamaq.producer.queue_connection import QueueConnection

REPLY_BLOCK_S = 1.0
"""Longest duration of one BLPOP for a reply. The worker's heartbeat is checked between two BLPOPs."""
LIST_TTL_MARGIN_MS = 60_000
"""The worker's list of commands expires this long after the deadline of the newest command, if no worker reads it."""


def build_command(action: SlotAction, slot: int | None = None, name: str | None = None) -> SlotCommand:
    """Return a validated command without a deadline; `send` sets it.

    Raises:
        InvalidRequest: The slot or the name is not valid, or the action does not accept it.
    """
    try:
        return SlotCommand(id=_new_id(), action=action, slot=slot, name=name, deadline_ms=0)
    except ValidationError as exc:
        raise InvalidRequest(codec.explain(exc)) from exc


async def list_slots(connection: QueueConnection, worker: str | None, timeout: float | None) -> tuple[WorkerSlots, ...]:
    """Return the slots of one worker, or of all workers of the queue. See `AsyncClient.slots`."""
    command = build_command(SlotAction.LIST)
    ids = await _worker_ids(connection)
    if worker is not None or not ids:
        ids = [choose_worker(ids, connection.settings.queue, worker)]
    replies = await asyncio.gather(*(send(connection, one, command, timeout) for one in ids))
    return tuple(
        WorkerSlots(worker=one, slots=reply.slots, files=reply.files) for one, reply in zip(ids, replies, strict=True)
    )


async def send_to_one(
    connection: QueueConnection, worker: str | None, command: SlotCommand, timeout: float | None
) -> SlotReply:
    """Send a command to the named worker, or to the only worker of the queue, and return the reply.

    Raises:
        NoWorker: No worker serves the queue.
        InvalidRequest: `worker` does not serve the queue, or it is None and several workers do.
        SlotCommandRefused: The worker refused the command, or ended before it replied.
        ResultTimeout: The reply did not arrive in time.
    """
    chosen = choose_worker(await _worker_ids(connection), connection.settings.queue, worker)
    return await send(connection, chosen, command, timeout)


def choose_worker(ids: list[str], queue: str, named: str | None) -> str:
    """Return `named`, or the only worker of `ids` if `named` is None.

    Raises:
        NoWorker: `ids` is empty.
        InvalidRequest: `named` is not in `ids`, or it is None and there are several workers.
    """
    if not ids:
        raise NoWorker(queue)
    if named is None and len(ids) > 1:
        raise InvalidRequest(f"worker: {len(ids)} workers serve queue {queue!r}; name one of: {', '.join(ids)}")
    if named is not None and named not in ids:
        raise InvalidRequest(f"worker: {named[:100]!r} does not serve queue {queue!r}; these do: {', '.join(ids)}")
    return named or ids[0]


async def send(connection: QueueConnection, worker: str, command: SlotCommand, timeout: float | None) -> SlotReply:
    """Send a command to a worker and return the reply. The worker ignores a command whose deadline has passed.

    Raises:
        SlotCommandRefused: The worker refused the command, or ended before it replied.
        ResultTimeout: The reply did not arrive in time.
    """
    redis, timeout_s = connection.redis, connection.timeout_s(timeout)
    deadline_ms = await server_time_ms(redis) + int(timeout_s * 1000)
    # A command may be sent to several workers. Each gets a new id, because the id names the list for the reply.
    command = command.model_copy(update={"id": _new_id(), "deadline_ms": deadline_ms})
    command_list = connection.keys.slot_commands(worker)
    async with redis.pipeline(transaction=False) as pipe:
        pipe.rpush(command_list, codec.encode_model(command))
        pipe.pexpire(command_list, int(timeout_s * 1000) + LIST_TTL_MARGIN_MS)
        await pipe.execute()
    reply = await _await_reply(connection, worker, command, timeout_s)
    if reply.error is not None:
        raise SlotCommandRefused(reply.error)
    return reply


async def _await_reply(connection: QueueConnection, worker: str, command: SlotCommand, timeout_s: float) -> SlotReply:
    redis, keys = connection.redis, connection.keys
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while (left_s := deadline_s - clock()) > 0:
        found: Any = await redis.blpop([keys.reply(command.id)], timeout=max(0.01, min(REPLY_BLOCK_S, left_s)))
        if found is not None:
            return codec.decode_model(SlotReply, found[1])
        if not await redis.exists(keys.worker(worker)):
            raise SlotCommandRefused(f"worker {worker} ended, or its heartbeat stopped, before it replied")
    raise ResultTimeout(f"worker {worker} has not replied within {timeout_s:g} s")


async def _worker_ids(connection: QueueConnection) -> list[str]:
    workers = await read_workers(connection.redis, connection.keys, connection.settings.queue)
    return [worker.card.worker for worker in workers]


def _new_id() -> str:
    return secrets.token_hex(16)
