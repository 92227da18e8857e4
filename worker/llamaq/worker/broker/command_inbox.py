"""What users ask of this worker by way of Redis: one list of orders, and a list with the answer for each.

An order is taken off its list first and carried out then, once at most: who asked waits for the answer, and asks again
if there is none. Nothing that an order says can end the worker.
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
"""How long to wait for an order in one command; less than the timeout of the socket."""
RETRY_S = 1.0
MAX_ORDER_BYTES = 4096
REPLY_TTL_S = 60
REMEMBERED = 64
"""Orders of which one that comes twice is known: a client's connection may break just when it has sent it."""


class CommandHandler(Protocol):
    """What carries orders out."""

    async def execute(self, order: SlotCommand) -> SlotReply:
        """Do what is asked, or raise what is wrong with it."""


class CommandInbox:
    """Takes the orders of one worker and answers them, one after the other."""

    def __init__(self, redis: Redis, keys: Keys, worker_id: str, control: CommandHandler) -> None:
        self._redis = redis
        self._keys = keys
        self._key = keys.slot_commands(worker_id)
        self._control = control
        self._seen: deque[str] = deque(maxlen=REMEMBERED)

    async def run(self) -> None:
        """Take and answer until cancelled."""
        while True:
            try:
                async with dedicated_connection(self._redis) as waiting:
                    while True:
                        found: Any = await waiting.blpop([self._key], timeout=BLOCK_S)
                        if found is not None:
                            await self._answer(found[1])
            except RedisError as exc:
                log.warning("orders.redis_error error=%r", exc)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("orders.failed")  # a defect here must not end the worker
                await asyncio.sleep(RETRY_S)

    async def _answer(self, data: bytes) -> None:
        order = await self._read(data)
        if order is None:
            return
        started_s = time.monotonic()
        reply = await self._carry_out(order)
        log.info(
            "order.done action=%s slot=%s name=%s seconds=%.3f error=%s",
            order.action.value,
            order.slot,
            order.name,
            time.monotonic() - started_s,
            reply.error,
        )
        key = self._keys.reply(order.id)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.rpush(key, codec.encode_model(reply))
            pipe.expire(key, REPLY_TTL_S)
            await pipe.execute()

    async def _read(self, data: bytes) -> SlotCommand | None:
        """The order, if it is one that is to be carried out; raises `RedisError`."""
        try:
            order = codec.decode_model(SlotCommand, data, MAX_ORDER_BYTES)
        except ProtocolError as exc:
            log.warning("order.dropped error=%s", exc)
            return None
        if order.deadline_ms < await server_time_ms(self._redis):
            log.info("order.too_late action=%s", order.action.value)
            return None
        if order.id in self._seen:
            return None
        self._seen.append(order.id)
        return order

    async def _carry_out(self, order: SlotCommand) -> SlotReply:
        try:
            return await self._control.execute(order)
        except (SlotCommandRefused, InvalidRequest) as exc:
            return SlotReply(error=str(exc))
        except OSError as exc:
            return SlotReply(error=f"the disk (--cache-dir): {exc.strerror or exc}")
        except Exception:  # a defect here must not end the worker
            log.exception("order.failed action=%s", order.action.value)
            return SlotReply(error="a defect of the worker; its log has the traceback")

    def __repr__(self) -> str:
        return f"<CommandInbox {self._key}>"
