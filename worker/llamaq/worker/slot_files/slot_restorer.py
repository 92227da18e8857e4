"""Restores the state of a slot: the state becomes a cached sequence that the jobs of its scope can use.

A restore runs on the engine thread between ticks, in steps of a few milliseconds. Each step loads at least one part of
the state. If sequences cannot be saved in parts, a state has one part, and the ticks wait for the whole copy.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamaq.common.errors import SlotCommandRefused
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.sequence_interface import SlotStateOps
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.eviction import Room
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.slot_files.slot_state_parts import SlotStatePart

STEP_S = 0.005
"""A step that has run for this time loads no further part."""


@dataclass(slots=True, eq=False)
class SlotRestore:
    """A restore in progress. Jobs cannot use the state before the restore is complete."""

    slot: Slot
    tokens: bytes
    """Packed tokens of the state."""
    scope: Scope
    parts: Sequence[SlotStatePart]
    entry: CachedSequence | None = None
    """The entry that the state is loaded into. None when the cache already contains the whole state."""
    n_restored: int = 0
    """Number of tokens of the state that are on the device."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_complete(self) -> bool:
        return self.n_restored == self.n_tokens

    def n_cells_to_load(self, n_held: int) -> int:
        """Return how many free cells the restore needs if the device holds the first `n_held` tokens.

        llama.cpp loads a part as a whole. The cells that the device already holds are removed after that.
        """
        n_loaded_again = max((n_held - part.first for part in self.parts if part.first < n_held < part.end), default=0)
        return self.n_tokens - n_held + n_loaded_again


class SlotRestorer:
    """Restores the states of slots. The message of a `SlotCommandRefused` is sent to the client."""

    def __init__(self, memory: KvMemory, sequences: SlotStateOps, clock: Callable[[], float]) -> None:
        """See `SlotOperations` for the parameters."""
        self._memory = memory
        self._sequences = sequences
        self._clock = clock
        self._restores: list[SlotRestore] = []
        """Restores that are not complete."""

    def begin(self, slot: Slot, tokens: bytes, scope: Scope, parts: Sequence[SlotStatePart]) -> SlotRestore | None:
        """Start restoring a state as the content of an idle slot.

        Args:
            slot: The slot.
            tokens: Packed tokens of the state.
            scope: The scope whose jobs may use the state.
            parts: The saved cells of the state.

        Returns:
            The restore. None while entries are evicted to make room: call again later.

        Raises:
            SlotCommandRefused: There is no room for the state.
        """
        restore = SlotRestore(slot, tokens, scope, parts)
        limit = self._sequences.cells_per_sequence
        if restore.n_tokens > limit:
            raise SlotCommandRefused(f"a state of {restore.n_tokens} tokens does not fit into {limit} cells (--n-ctx)")
        if self._is_cached(tokens, scope):
            restore.n_restored = restore.n_tokens
            self._finish(restore)
            return restore
        n_copyable = self._memory.entries.n_copyable(tokens, scope)
        room = self._memory.make_room_for_entry(restore.n_cells_to_load(n_copyable))
        if room is Room.UNAVAILABLE:
            raise SlotCommandRefused(f"there is no room for {restore.n_tokens} tokens beside the running jobs")
        if room is Room.PENDING or self._memory.entries.n_copyable(tokens, scope) < n_copyable:
            return None  # PENDING: try again later. Fewer copyable tokens: the eviction removed the entry to copy from
        hidden = Scope(hashed=secrets.token_bytes(32))
        restore.entry, restore.n_restored = self._memory.entries.begin_restore(tokens, scope, hidden)
        self._restores.append(restore)
        if restore.is_complete:  # the whole state was copied from a running job
            self._finish(restore)
        return restore

    def step(self, restore: SlotRestore) -> None:
        """Load parts for about `STEP_S`. The last step makes the state available to the jobs of its scope.

        Raises:
            SlotCommandRefused: The state was evicted, or llama.cpp refuses it.
        """
        deadline_s = self._clock() + STEP_S
        while not restore.is_complete:
            entry = restore.entry
            if entry is None or entry not in self._memory.entries:
                raise SlotCommandRefused("the state was evicted during the restore: running jobs need its cells")
            part = next(part for part in restore.parts if part.end > restore.n_restored)
            if not self._sequences.load(entry.seq_id, restore.n_restored, part.end, part.data, part.first):
                raise SlotCommandRefused("llama.cpp refuses this state")
            restore.n_restored = part.end
            if self._clock() >= deadline_s:
                break
        if restore.is_complete:
            self._finish(restore)

    def cancel(self, restore: SlotRestore) -> None:
        """Remove the entry of a restore that is not complete. Does nothing after the restore is complete."""
        if restore in self._restores:
            self._restores.remove(restore)
            if restore.entry is not None and restore.entry in self._memory.entries:
                self._memory.entries.remove(restore.entry)

    def close(self) -> None:
        """Cancel all restores, so that no incomplete entry is saved to disk."""
        for restore in list(self._restores):
            self.cancel(restore)

    def _is_cached(self, tokens: bytes, scope: Scope) -> bool:
        """Whether an entry contains the whole state and is not being moved to the offload tiers."""
        match = self._memory.entries.match(tokens, scope)
        is_staying = isinstance(match.source, CachedSequence) and not match.source.in_transfer
        return is_staying and match.n_held * TOKEN_BYTES == len(tokens)

    def _finish(self, restore: SlotRestore) -> None:
        if restore.entry is not None:
            self._restores.remove(restore)
            self._memory.entries.finish_restore(restore.entry, restore.scope)
        if restore.slot.run is None:  # otherwise a job was admitted to the slot during the restore
            restore.slot.content, restore.slot.scope = restore.tokens, restore.scope
