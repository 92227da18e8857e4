"""Asking one worker something about its slots, and waiting for the answer."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis

from llamaq.common.errors import InvalidRequest, NoWorker, ResultTimeout, SlotCommandRefused
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_state import Worker
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotReply
from llamaq.common.redis.server_time import server_time_ms

BLOCK_S = 1.0
"""How long to wait in one command; then it is looked whether the worker still lives."""
SLACK_MS = 60_000
"""The list of orders outlives the last of them by this, where no worker takes them."""


def choose_worker(workers: tuple[Worker, ...], queue: str, named: str | None) -> str:
    """The worker that is meant: the named one, or the only one. Raises `NoWorker`, `InvalidRequest`."""
    ids = [worker.card.worker for worker in workers]
    if not ids:
        raise NoWorker(queue)
    if named is None and len(ids) > 1:
        raise InvalidRequest(f"worker: {len(ids)} serve queue {queue!r}, say which: {', '.join(ids)}")
    if named is not None and named not in ids:
        raise InvalidRequest(f"worker: {named[:100]!r} does not serve queue {queue!r}; these do: {', '.join(ids)}")
    return named or ids[0]


def check_order(action: SlotAction, slot: int | None = None, name: str | None = None) -> SlotCommand:
    """An order to be given with `ask`; raises `InvalidRequest`."""
    try:
        return SlotCommand(id=secrets.token_hex(16), action=action, slot=slot, name=name, deadline_ms=0)
    except ValidationError as exc:
        raise InvalidRequest(codec.explain(exc)) from exc


async def ask(redis: Redis, keys: Keys, worker: str, order: SlotCommand, timeout_s: float) -> SlotReply:
    """Have a worker carry out an order, unless it does not take it within `timeout_s`, and return what it answers.

    Raises `SlotCommandRefused`, also when the worker ends meanwhile, and `ResultTimeout`.
    """
    deadline_ms = await server_time_ms(redis) + int(timeout_s * 1000)
    # An id of its own for each worker: the same order may go to several.
    order = order.model_copy(update={"id": secrets.token_hex(16), "deadline_ms": deadline_ms})
    async with redis.pipeline(transaction=False) as pipe:
        pipe.rpush(keys.orders(worker), codec.encode_model(order))
        pipe.pexpire(keys.orders(worker), int(timeout_s * 1000) + SLACK_MS)
        await pipe.execute()
    reply = await _await_reply(redis, keys, worker, order, timeout_s)
    if reply.error is not None:
        raise SlotCommandRefused(reply.error)
    return reply


async def _await_reply(redis: Redis, keys: Keys, worker: str, order: SlotCommand, timeout_s: float) -> SlotReply:
    clock = asyncio.get_running_loop().time
    until_s = clock() + timeout_s
    while (left_s := until_s - clock()) > 0:
        found: Any = await redis.blpop([keys.reply(order.id)], timeout=max(0.01, min(BLOCK_S, left_s)))
        if found is not None:
            return codec.decode_model(SlotReply, found[1])
        if not await redis.exists(keys.worker(worker)):
            raise SlotCommandRefused(f"worker {worker} ended, or fell silent, before it answered")
    raise ResultTimeout(f"worker {worker} has not answered within {timeout_s:g} s")
