"""Slots' states on explicit demand, on the engine thread between ticks: who holds what, and what is to be forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.common.errors import SlotCommandRefused
from llamaq.common.protocol.queue_state import SlotSnapshot
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.sequence_ops import SlotStateOps
from llamaq.worker.core.slot import Slot
from llamaq.worker.core.tokens import TOKEN_BYTES, common_prefix
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache import Entry
from llamaq.worker.slot_files.restore_slot import SlotRestore, SlotRestorer
from llamaq.worker.slot_files.save_slot import SlotSave, SlotSaver
from llamaq.worker.slot_files.state_parts import StatePart


class SlotOperations:
    """What can be done with the states of a worker's slots. `SlotCommandRefused` says why something cannot."""

    def __init__(self, memory: KvMemory, mover: SlotStateOps, tiers: Offload) -> None:
        self.saver = SlotSaver(memory, mover, tiers)
        self.restorer = SlotRestorer(memory, mover)
        self._memory = memory
        self._pool = memory.pool
        self._tiers = tiers

    def snapshots(self) -> tuple[SlotSnapshot, ...]:
        """The slots as they are now."""
        return tuple(slot.snapshot() for slot in self._pool)

    def begin_save(self, index: int) -> SlotSave:
        """See `SlotSaver.begin`."""
        return self.saver.begin(self._slot(index))

    def begin_restore(self, index: int, tokens: bytes, scope: Scope, parts: Sequence[StatePart]) -> SlotRestore | None:
        """See `SlotRestorer.begin`. The slot is to be idle."""
        return self.restorer.begin(self._idle_slot(index), tokens, scope, parts)

    def erase(self, index: int) -> int:
        """Forget the slot's content, and the cells that nobody else's content needs; returns how many tokens it had."""
        slot = self._idle_slot(index)
        tokens, scope = slot.content, slot.scope
        own, others = self._entries_of(tokens, scope)
        n_kept = max((common_prefix(other.tokens, tokens) for other in others), default=0)
        for entry in own:
            if entry.n_tokens > n_kept:
                self._memory.forget(entry)
        self._tiers.discard(tokens, scope, n_kept)
        slot.content, slot.scope = b"", Scope()
        return len(tokens) // TOKEN_BYTES

    def _entries_of(self, tokens: bytes, scope: Scope) -> tuple[list[Entry], list[Entry]]:
        """The entries of this scope that hold beginnings of these tokens, and those that hold something else."""
        entries = [entry for entry in self._memory.cache.entries() if entry.scope.key == scope.key]
        own = [entry for entry in entries if tokens.startswith(entry.tokens)]
        return own, [entry for entry in entries if entry not in own]

    def _slot(self, index: int) -> Slot:
        if index >= len(self._pool.slots):
            raise SlotCommandRefused(f"there is no slot {index}: the worker has {len(self._pool.slots)}, from 0 on")
        return self._pool.slots[index]

    def _idle_slot(self, index: int) -> Slot:
        slot = self._slot(index)
        if slot.run is not None:
            raise SlotCommandRefused(f"slot {index} is running job {slot.run.job.id}: wait for its end, or cancel it")
        return slot
