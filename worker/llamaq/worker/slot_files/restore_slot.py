"""The state of a slot is put back: it becomes a kept sequence, for all jobs of its scope.

In steps of a few milliseconds, a block of tokens at least, on the engine thread between ticks. Where memory is not
loaded in parts, a state is one block, and ticks wait for as long as its copy takes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamaq.common.errors import SlotCommandRefused
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.sequence_ops import SlotStateOps
from llamaq.worker.core.slot import Slot
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.eviction import Room
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_cache import Entry
from llamaq.worker.slot_files.state_parts import StatePart

STEP_S = 0.005
"""A step begins no further block after this."""


@dataclass(slots=True, eq=False)
class SlotRestore:
    """A state on its way in. Until it is complete nobody can find it."""

    slot: Slot
    tokens: bytes
    scope: Scope
    parts: Sequence[StatePart]
    entry: Entry | None = None
    """Its place; None where all of it was there."""
    n_restored: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_complete(self) -> bool:
        return self.n_restored == self.n_tokens


class SlotRestorer:
    """Puts the states of slots. `SlotCommandRefused` says why one cannot be put."""

    def __init__(self, memory: KvMemory, mover: SlotStateOps, clock: Callable[[], float] = time.perf_counter) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._mover = mover
        self._clock = clock
        self._restores: list[SlotRestore] = []
        """Those that are under way."""

    def begin(self, slot: Slot, tokens: bytes, scope: Scope, parts: Sequence[StatePart]) -> SlotRestore | None:
        """Begin to put a state into the cache, as the slot's content. None while others are leaving to make room."""
        restore = SlotRestore(slot, tokens, scope, parts)
        limit = self._mover.cells_per_sequence
        if restore.n_tokens > limit:
            raise SlotCommandRefused(f"a state of {restore.n_tokens} tokens does not fit into {limit} cells (--n-ctx)")
        if self._is_kept(tokens, scope):
            restore.n_restored = restore.n_tokens
            self._settle(restore)
            return restore
        n_shareable = self._n_shareable(restore)
        room = self._memory.eviction.make_way(restore.n_tokens - n_shareable)
        if room is Room.NONE:
            raise SlotCommandRefused(f"there is no room for {restore.n_tokens} tokens beside the jobs that run")
        if room is Room.SOON or self._n_shareable(restore) < n_shareable:  # the latter: what was shared had to go
            return None
        self._take_place(restore)
        if restore.is_complete:  # a job that runs had all of it
            self._settle(restore)
        return restore

    def step(self, restore: SlotRestore) -> None:
        """Go on restore; at the end the state is there for all jobs of its scope."""
        until_s = self._clock() + STEP_S
        while not restore.is_complete:
            entry = restore.entry
            if entry is None or entry not in self._memory.cache.entries():
                raise SlotCommandRefused("the state had to give way to jobs that run: there is no room for it")
            part = next(part for part in restore.parts if part.end > restore.n_restored)
            if not self._mover.load(entry.seq_id, restore.n_restored, part.end, part.data, part.first):
                raise SlotCommandRefused("llama.cpp does not take this state")
            restore.n_restored = part.end
            if self._clock() >= until_s:
                break
        if restore.is_complete:
            self._settle(restore)

    def end(self, restore: SlotRestore) -> None:
        """Take back what is not complete."""
        if restore in self._restores:
            self._restores.remove(restore)
            if restore.entry in self._memory.cache.entries():
                self._memory.forget(restore.entry)

    def close(self) -> None:
        """Take back what is under way: the cache is about to be saved."""
        for restore in list(self._restores):
            self.end(restore)

    def _is_kept(self, tokens: bytes, scope: Scope) -> bool:
        found = self._memory.cache.match(tokens, scope)
        is_entry = isinstance(found.source, Entry) and not found.source.leaving
        return is_entry and found.n_tokens * TOKEN_BYTES == len(tokens)

    def _n_shareable(self, restore: SlotRestore) -> int:
        found = self._memory.cache.match(restore.tokens, restore.scope)
        return found.n_tokens if self._mover.in_blocks else 0

    def _take_place(self, restore: SlotRestore) -> None:
        """A sequence with all the cells that it will have, kept for a scope that nobody else is in.

        It counts as leaving, so that jobs that need its place wait for the end rather than have it saved.
        """
        seq_id = self._pool.keep_another()
        found = self._memory.cache.match(restore.tokens, restore.scope)
        if self._mover.in_blocks and found.source is not None:
            restore.n_restored = self._mover.copy(found.source.seq_id, seq_id, found.n_tokens)
            self._pool.share(found.source.seq_id, seq_id, restore.n_restored)
        self._pool.hold(seq_id, restore.n_tokens)
        self._memory.keep(seq_id, restore.tokens, Scope(hashed=secrets.token_bytes(32)))
        restore.entry = self._memory.cache.entries()[-1]
        restore.entry.leaving = True
        self._restores.append(restore)

    def _settle(self, restore: SlotRestore) -> None:
        if restore.entry is not None:
            self._restores.remove(restore)
            self._memory.cache.remove(restore.entry)
            self._memory.keep(restore.entry.seq_id, restore.tokens, restore.scope)
        if restore.slot.run is None:  # else another job has come meanwhile
            restore.slot.content, restore.slot.scope = restore.tokens, restore.scope
