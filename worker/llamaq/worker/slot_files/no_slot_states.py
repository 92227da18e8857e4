"""Replaces the slot commands of a worker whose jobs leave no KV cells."""

from __future__ import annotations

from llamaq.common.errors import SlotCommandRefused
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotReply
from llamaq.worker.engine_loop.tick_loop import TickLoop


class NoSlotStates:
    """Executes the slot commands of a worker that has no KV cells to save.

    Args:
        ticks: Has the last snapshot of the slots.
    """

    def __init__(self, ticks: TickLoop) -> None:
        self._ticks = ticks

    async def execute(self, command: SlotCommand) -> SlotReply:
        """Return the slots. Raises `SlotCommandRefused` for all other commands."""
        if command.action is not SlotAction.LIST:
            raise SlotCommandRefused("this worker computes embeddings (--embeddings): its slots have no state to save")
        return SlotReply(slots=self._ticks.snapshot.slots)
