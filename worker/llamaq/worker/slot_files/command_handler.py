"""Orders about slots, carried out: the engine thread moves states in steps, a thread of its own reads and writes files.

Runs in the I/O thread's loop, one order at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from llamaq.common.errors import InvalidRequest, SlotCommandRefused
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotFile, SlotReply
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.offload.background_thread import BackgroundThread
from llamaq.worker.slot_files.restore_slot import SlotRestore
from llamaq.worker.slot_files.saved_files import SavedSlot, SavedSlotFiles, SavedSlotInfo
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.state_parts import StatePart, join_parts, split_parts

log = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_EVERY_S = 0.02
ROOM_TIMEOUT_S = 30.0
"""How long kept sequences may take to leave for a state that is restored."""
KEY_BYTES = 32


class SlotCommandHandler:
    """What a worker can be asked about its slots. Without `saved` they can only be listed."""

    def __init__(self, ticks: TickLoop, states: SlotOperations, saved: SavedSlotFiles | None) -> None:
        self._ticks = ticks
        self._states = states
        self._saved = saved
        self._disk = BackgroundThread("llamaq-slots")

    async def carry_out(self, order: SlotCommand) -> SlotReply:
        """Do what is asked. Raises `SlotCommandRefused`, `InvalidRequest`, and `OSError` of a disk."""
        if order.action is SlotAction.LIST:
            return await self._list()
        saved = self._need_folder()
        match order:
            case SlotCommand(action=SlotAction.SAVE, slot=int(slot), name=str(name)):
                return SlotReply(files=(await self._save(saved, slot, name),))
            case SlotCommand(action=SlotAction.RESTORE, slot=int(slot), name=str(name)):
                return SlotReply(files=(await self._restore(saved, slot, name),))
            case SlotCommand(action=SlotAction.ERASE, slot=int(slot)):
                return SlotReply(n_tokens=await self._between_ticks(partial(self._states.erase, slot)))
            case SlotCommand(action=SlotAction.ERASE, name=str(name)):
                await self._on_disk(partial(saved.erase, name))
                return SlotReply()
        raise LookupError(f"nothing is done for {order!r}")

    def close(self) -> None:
        """Give up what is under way, once the engine thread makes no more ticks."""
        self._states.restorer.close()
        self._disk.close(0)

    async def _list(self) -> SlotReply:
        slots = await self._between_ticks(self._states.snapshots)
        saved = await self._on_disk(self._saved.list_all) if self._saved else []
        return SlotReply(slots=slots, files=tuple(map(_describe, saved)))

    async def _save(self, saved: SavedSlotFiles, slot: int, name: str) -> SlotFile:
        reader = self._states.saver
        save = await self._between_ticks(partial(self._states.begin_save, slot))
        while not save.is_complete:
            coming = await self._between_ticks(partial(reader.step, save))
            if coming is not None:
                save.take(await asyncio.wrap_future(coming))
        meta = {"namespace": save.scope.key.hex(), "public": save.scope.public}

        def write() -> SavedSlotInfo:
            return saved.write(name, meta, save.tokens, join_parts(save.parts))

        return _describe(await self._on_disk(write))

    async def _restore(self, saved: SavedSlotFiles, slot: int, name: str) -> SlotFile:
        state = await self._on_disk(partial(saved.read, name))
        scope, parts = _read(state)
        restore = await self._await_room(partial(self._states.begin_restore, slot, state.tokens, scope, parts))
        try:
            while not restore.is_complete:
                await self._between_ticks(partial(self._states.restorer.step, restore))
        finally:
            self._ticks.call(partial(self._states.restorer.end, restore))
        return _describe(state.info)

    async def _await_room(self, begin: Callable[[], SlotRestore | None]) -> SlotRestore:
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                while (restore := await self._between_ticks(begin)) is None:  # noqa: ASYNC110 - entries are leaving
                    await asyncio.sleep(ROOM_EVERY_S)
                return restore
        except TimeoutError as exc:
            raise SlotCommandRefused(f"there was no room for the state within {ROOM_TIMEOUT_S:g} s") from exc

    def _need_folder(self) -> SavedSlotFiles:
        if self._saved is None:
            raise SlotCommandRefused(
                "the worker keeps no states of slots: start it with --cache-dir, and with the prefix cache"
            )
        return self._saved

    async def _between_ticks(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._ticks.call(work))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._disk.submit(work))


def _describe(info: SavedSlotInfo) -> SlotFile:
    return SlotFile(
        name=info.name,
        n_tokens=info.n_tokens,
        n_bytes=info.n_bytes,
        saved_ms=int(info.saved_s * 1000),
        is_usable=info.is_usable,
    )


def _read(state: SavedSlot) -> tuple[Scope, list[StatePart]]:
    """Who may share the state, and its parts. Raises `InvalidRequest` for what no worker has written."""
    try:
        key, public = bytes.fromhex(state.info.meta["namespace"]), int(state.info.meta["public"])
        if len(key) != KEY_BYTES or public < 0:
            raise ValueError("no scope")
        return Scope(public=public, hashed=key), split_parts(state.data, state.info.n_tokens)
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidRequest(f"slot state {state.info.name!r} is damaged: {exc}") from exc
