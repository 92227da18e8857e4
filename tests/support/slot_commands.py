"""Slot commands for tests, and a command inbox that serves them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.command_inbox import CommandInbox

INVALID_NAMES = ["", "a/b", "../x", "a.slot", ".", "a b", "x" * 65, "ä", "a\n", "a\0"]


class RecordingHandler:
    """Records every command, and replies with the result of `answer`."""

    def __init__(self, answer: Callable[[SlotCommand], SlotReply] = lambda _: SlotReply()) -> None:
        self.commands: list[SlotCommand] = []
        self._answer = answer

    async def execute(self, command: SlotCommand) -> SlotReply:
        self.commands.append(command)
        return self._answer(command)


@asynccontextmanager
async def serving(url: str, queue: str, handler: Any, name: str = "w1") -> AsyncIterator[None]:
    """Announce a worker and run its command inbox until the end of the block."""
    async with FakeWorker(url, queue, name=f"{queue}-{name}") as worker:
        await worker.announce()
        task = asyncio.create_task(CommandInbox(worker.redis, worker.keys, worker.name, handler).run())
        try:
            yield
        finally:
            await cancel_tasks(task)


def make_command(**values: Any) -> SlotCommand:
    rest = {"id": secrets.token_hex(16), "action": "list", "deadline_ms": 2**50}
    return SlotCommand.model_validate(rest | values)
