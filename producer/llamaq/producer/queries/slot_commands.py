"""Commands to a worker about its slots: list, save, restore and erase."""

from __future__ import annotations

import asyncio

from llamaq.common.errors import InvalidRequest, NoWorker, SlotCommandRefused
from llamaq.common.protocol import codec
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotReply, WorkerSlots
from llamaq.producer.queries.worker_commands import exchange, new_command_id, worker_ids
from llamaq.producer.queue_connection import QueueConnection


def build_command(action: SlotAction, slot: int | None = None, name: str | None = None) -> SlotCommand:
    """Return a validated command without a deadline; `send` sets it.

    Raises:
        InvalidRequest: The slot or the name is not valid, or the action does not accept it.
    """
    values = {"id": new_command_id(), "action": action, "slot": slot, "name": name, "deadline_ms": 0}
    return codec.build_model(SlotCommand, values)


async def list_slots(connection: QueueConnection, worker: str | None, timeout: float | None) -> tuple[WorkerSlots, ...]:
    """Return the slots of one worker, or of all workers of the queue. See `AsyncClient.slots`."""
    command = build_command(SlotAction.LIST)
    ids = await worker_ids(connection)
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
    chosen = choose_worker(await worker_ids(connection), connection.settings.queue, worker)
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
        raise InvalidRequest(f"worker: {str(named)[:100]!r} does not serve queue {queue!r}; these do: {', '.join(ids)}")
    return named or ids[0]


async def send(connection: QueueConnection, worker: str, command: SlotCommand, timeout: float | None) -> SlotReply:
    """Send a command to a worker and return the reply. The worker ignores a command whose deadline has passed.

    Raises:
        SlotCommandRefused: The worker refused the command, or ended before it replied.
        ResultTimeout: The reply did not arrive in time.
    """
    reply = await exchange(connection, worker, connection.keys.slot_commands(worker), command, SlotReply, timeout)
    if reply.error is not None:
        raise SlotCommandRefused(reply.error)
    return reply
