"""Executes the slot commands of clients: list, save, restore and erase.

The handler runs in the event loop of the I/O thread, one command at a time. The engine thread moves cells in short
steps between ticks, and a background thread reads and writes files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from llamaq.common.errors import InvalidRequest, SlotCommandRefused
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotFile, SlotReply
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.engine_loop.command_queue import CommandQueue
from llamaq.worker.offload.background_thread import BackgroundThread
from llamaq.worker.slot_files.saved_slot_files import SavedSlot, SavedSlotFiles, SavedSlotInfo
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.slot_restorer import SlotRestore
from llamaq.worker.slot_files.slot_state_parts import SlotStatePart, join_parts, split_parts

log = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_POLL_S = 0.02
"""Interval between two attempts to start a restore while entries are evicted for it."""
ROOM_TIMEOUT_S = 30.0
"""A restore is refused if its cells do not become free within this time."""
KEY_BYTES = 32


class SlotCommandHandler:
    """Executes slot commands. Without a folder of saved slots, only `list` is allowed."""

    def __init__(self, commands: CommandQueue, operations: SlotOperations, files: SavedSlotFiles | None) -> None:
        """Start the background thread.

        Args:
            commands: Runs the operations on the engine thread, between ticks.
            operations: The operations on the slots.
            files: The saved slots. None: the worker has no cache folder.
        """
        self._commands = commands
        self._operations = operations
        self._files = files
        self._disk = BackgroundThread("llamaq-slots")

    async def execute(self, command: SlotCommand) -> SlotReply:
        """Execute a command and return its reply.

        Raises:
            SlotCommandRefused: The state of the worker does not allow the command.
            InvalidRequest: The name or the saved file is invalid.
            OSError: The disk is full or refuses to write.
        """
        if command.action is SlotAction.LIST:
            return await self._list()
        files = self._require_files()
        match command:
            case SlotCommand(action=SlotAction.SAVE, slot=int(slot), name=str(name)):
                return SlotReply(files=(await self._timed("saved", slot, self._save(files, slot, name)),))
            case SlotCommand(action=SlotAction.RESTORE, slot=int(slot), name=str(name)):
                return SlotReply(files=(await self._timed("restored", slot, self._restore(files, slot, name)),))
            case SlotCommand(action=SlotAction.ERASE, slot=int(slot)):
                return SlotReply(n_tokens=await self._between_ticks(partial(self._operations.erase, slot)))
            case SlotCommand(action=SlotAction.ERASE, name=str(name)):
                await self._on_disk(partial(files.erase, name))
                return SlotReply()
        raise LookupError(f"no action for {command!r}")

    def close(self) -> None:
        """Cancel unfinished restores and file operations. Call this after the last tick."""
        self._operations.restorer.close()
        self._disk.close(0)

    async def _list(self) -> SlotReply:
        slots = await self._between_ticks(self._operations.snapshots)
        saved = await self._on_disk(self._files.list_all) if self._files else []
        return SlotReply(slots=slots, files=tuple(map(_slot_file, saved)))

    async def _timed(self, done: str, slot: int, operation: Awaitable[SlotFile]) -> SlotFile:
        """Await a save or restore, log how long it took, and return its file with this time."""
        started_s = time.monotonic()
        file = await operation
        duration_ms = round((time.monotonic() - started_s) * 1000, 3)
        log.info(
            "slot.%s slot=%d name=%s tokens=%d duration_ms=%.1f", done, slot, file.name, file.n_tokens, duration_ms
        )
        return file.model_copy(update={"duration_ms": duration_ms})

    async def _save(self, files: SavedSlotFiles, slot: int, name: str) -> SlotFile:
        saver = self._operations.saver
        save = await self._between_ticks(partial(self._operations.begin_save, slot))
        while not save.is_complete:
            disk_read = await self._between_ticks(partial(saver.step, save))
            if disk_read is not None:
                save.add_awaited_part(await asyncio.wrap_future(disk_read))
        meta = {"namespace": save.scope.key.hex(), "public": save.scope.public}

        def write() -> SavedSlotInfo:
            return files.write(name, meta, save.tokens, join_parts(save.parts))

        return _slot_file(await self._on_disk(write))

    async def _restore(self, files: SavedSlotFiles, slot: int, name: str) -> SlotFile:
        saved = await self._on_disk(partial(files.read, name))
        scope, parts = _decode(saved)
        restore = await self._begin_restore(partial(self._operations.begin_restore, slot, saved.tokens, scope, parts))
        try:
            while not restore.is_complete:
                await self._between_ticks(partial(self._operations.restorer.step, restore))
        finally:
            self._commands.call(partial(self._operations.restorer.cancel, restore))
        return _slot_file(saved.info)

    async def _begin_restore(self, begin: Callable[[], SlotRestore | None]) -> SlotRestore:
        """Call `begin` between ticks until it returns a restore. Until then, entries are evicted to make room.

        The time limit does not end a running call, because the restore that it begins would never be cancelled.
        """
        until_s = time.monotonic() + ROOM_TIMEOUT_S
        while (restore := await self._between_ticks(begin)) is None:
            if time.monotonic() >= until_s:
                raise SlotCommandRefused(f"no room for the state became free within {ROOM_TIMEOUT_S:g} s")
            await asyncio.sleep(ROOM_POLL_S)
        return restore

    def _require_files(self) -> SavedSlotFiles:
        if self._files is None:
            raise SlotCommandRefused("this worker cannot save slots: start it with --cache-dir and --cache-prompt")
        return self._files

    async def _between_ticks(self, call: Callable[[], T]) -> T:
        """Run a call on the engine thread between two ticks."""
        return await asyncio.wrap_future(self._commands.call(call))

    async def _on_disk(self, call: Callable[[], T]) -> T:
        """Run a call in the background thread."""
        return await asyncio.wrap_future(self._disk.submit(call))


def _slot_file(info: SavedSlotInfo) -> SlotFile:
    return SlotFile(
        name=info.name,
        n_tokens=info.n_tokens,
        n_bytes=info.n_bytes,
        saved_ms=int(info.saved_s * 1000),
        is_usable=info.is_usable,
    )


def _decode(saved: SavedSlot) -> tuple[Scope, list[SlotStatePart]]:
    """Return the scope and the parts of a saved state. Raises `InvalidRequest` when they are damaged."""
    try:
        key, public = bytes.fromhex(saved.info.meta["namespace"]), int(saved.info.meta["public"])
        if len(key) != KEY_BYTES or public < 0:
            raise ValueError("the scope is invalid")
        return Scope(public=public, hashed=key), split_parts(saved.data, saved.info.n_tokens)
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidRequest(f"slot state {saved.info.name!r} is damaged: {exc}") from exc
