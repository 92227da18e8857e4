"""Asks a worker for the tokens of a text, the text of tokens, or a rendered chat."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from llamaq.common.errors import InvalidRequest, NoWorker, WorkerEnded
from llamaq.common.protocol import codec
from llamaq.common.protocol.text_commands import TextAction, TextCommand, TextReply
from llamaq.producer.option_synonyms import translate
from llamaq.producer.queries.worker_commands import exchange, new_command_id, responsive_worker_ids
from llamaq.producer.queue_connection import QueueConnection


async def ask(connection: QueueConnection, action: TextAction, timeout: float | None, **values: Any) -> TextReply:
    """Send a text command to a random worker of the queue and return the reply. If it ends, another worker is asked.

    Args:
        connection: The client's connection.
        action: The action.
        timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.
        **values: The input: `text`, `tokens` or `messages`.

    Raises:
        InvalidRequest: The input is not valid, is too large, or the worker refused it.
        NoWorker: No worker serves the queue.
        WorkerEnded: The worker ended before it replied, and the queue has no other worker.
        ResultTimeout: The reply did not arrive in time.
    """
    if "messages" in values:
        values = translate(values)
    command = codec.build_model(TextCommand, {"id": new_command_id(), "action": action, "deadline_ms": 0, **values})
    codec.check_input(command, connection.settings.max_request_bytes)
    reply = await _exchange_with_any(connection, command, connection.timeout_s(timeout))
    if reply.error is not None:
        raise InvalidRequest(reply.error)
    return reply


async def _exchange_with_any(connection: QueueConnection, command: TextCommand, timeout_s: float) -> TextReply:
    """Send a command to one worker after the other until one replies.

    Raises:
        NoWorker: No worker serves the queue.
        WorkerEnded: The worker ended before it replied, and the queue has no other worker.
        ResultTimeout: The reply did not arrive in time.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    ended: WorkerEnded | None = None
    while workers := await responsive_worker_ids(connection):
        worker = random.choice(workers)
        left_s = max(0.0, deadline_s - clock())
        try:
            return await exchange(connection, worker, connection.keys.text_commands(worker), command, TextReply, left_s)
        except WorkerEnded as exc:
            ended = exc
    raise ended or NoWorker(connection.settings.queue)
