"""The operations of slot commands on the engine thread: list the slots, save, restore and erase their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llamaq.common.errors import SlotCommandRefused
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES, common_prefix
from llamaq.worker.core.sequence_interface import SlotStateOps
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.slot_files.slot_restorer import SlotRestore, SlotRestorer
from llamaq.worker.slot_files.slot_saver import SlotSave, SlotSaver
from llamaq.worker.slot_files.slot_state_parts import SlotStatePart


class SlotOperations:
    """The operations on a worker's slots. All methods are called on the engine thread, between ticks.

    Each method with the index of a slot raises `SlotCommandRefused` when the worker does not have this slot.
    """

    def __init__(
        self,
        memory: KvMemory,
        sequences: SlotStateOps,
        offload: Offload,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Connect the parts.

        Args:
            memory: The slots and the cached entries.
            sequences: Saves, loads and copies the cells of the engine's sequences.
            offload: The offload tiers.
            clock: Returns the time in seconds. It limits the steps of saves and restores.
        """
        self.saver = SlotSaver(memory, sequences, offload, clock)
        self.restorer = SlotRestorer(memory, sequences, clock)
        self._memory = memory
        self._offload = offload

    def snapshots(self) -> tuple[SlotSnapshot, ...]:
        """Return a snapshot of every slot."""
        return tuple(slot.snapshot() for slot in self._memory.slots)

    def begin_save(self, index: int) -> SlotSave:
        """Start saving the state of a slot. See `SlotSaver.begin`."""
        return self.saver.begin(self._slot(index))

    def begin_restore(
        self, index: int, tokens: bytes, scope: Scope, parts: Sequence[SlotStatePart]
    ) -> SlotRestore | None:
        """Start restoring a state into an idle slot. See `SlotRestorer.begin`."""
        return self.restorer.begin(self._idle_slot(index), tokens, scope, parts)

    def erase(self, index: int) -> int:
        """Erase the content of an idle slot, and its cached cells in all tiers.

        Cells that other cached content needs are kept.

        Returns:
            The number of tokens of the erased content.
        """
        slot = self._idle_slot(index)
        tokens, scope = slot.content, slot.scope
        prefixes, others = self._entries_of(tokens, scope)
        n_kept = max((common_prefix(other.tokens, tokens) for other in others), default=0)
        for entry in prefixes:
            if entry.n_tokens > n_kept:
                self._memory.entries.remove(entry)
        self._offload.discard(tokens, scope, n_kept)
        slot.content, slot.scope = b"", Scope()
        return len(tokens) // TOKEN_BYTES

    def _entries_of(self, tokens: bytes, scope: Scope) -> tuple[list[CachedSequence], list[CachedSequence]]:
        """Return the entries of this scope in two lists: those that hold a prefix of `tokens`, and the others."""
        entries = self._memory.entries.of_namespace(scope)
        prefixes = [entry for entry in entries if tokens.startswith(entry.tokens)]
        return prefixes, [entry for entry in entries if entry not in prefixes]

    def _slot(self, index: int) -> Slot:
        if index >= len(self._memory.slots):
            raise SlotCommandRefused(f"there is no slot {index}: the worker has {len(self._memory.slots)}, from 0 on")
        return self._memory.slots[index]

    def _idle_slot(self, index: int) -> Slot:
        slot = self._slot(index)
        if slot.run is not None:
            raise SlotCommandRefused(f"slot {index} is running job {slot.run.job.id}: wait for its end, or cancel it")
        return slot
