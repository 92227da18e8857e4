"""The cached entries: the records of the prefix cache, together with the engine's sequences that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.sequence_interface import SequenceOps
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, DeviceMatch, PrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool


class CachedEntries:
    """Adds and removes entries. Their records in the cache and in the pool, and their sequences, change together.

    Args:
        pool: The slots, sequences and cells.
        sequences: The engine's sequences.
        cache: The entries on the device.
        offload: The tiers behind the device. A transfer ends when its sequence is removed.
        on_added: Called with the packed tokens and the scope of an entry after it was offered to the cache.
        on_removed: Called after an entry was removed.
    """

    def __init__(
        self,
        pool: SlotPool,
        sequences: SequenceOps,
        cache: PrefixCache,
        offload: Offload,
        *,
        on_added: Callable[[bytes, Scope], None],
        on_removed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._sequences = sequences
        self._cache = cache
        self._offload = offload
        self._on_added = on_added
        self._on_removed = on_removed

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, entry: CachedSequence) -> bool:
        """Whether the entry has not been evicted."""
        return entry in self._cache

    def match(self, tokens: bytes, scope: Scope) -> DeviceMatch:
        """Return the longest prefix of these packed tokens on the device. The matched entry counts as used now."""
        return self._cache.match(tokens, scope)

    def of_namespace(self, scope: Scope) -> list[CachedSequence]:
        """Return the entries of the scope's namespace."""
        return [entry for entry in self._cache.entries() if entry.scope.key == scope.key]

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> CachedSequence | None:
        """Offer a sequence to the cache. Returns its entry, or None when another entry holds the same tokens."""
        self.remove_sequences(self._cache.insert(seq_id, tokens, scope))
        self._on_added(tokens, scope)
        return self._cache.entry_of(seq_id)

    def remove(self, entry: CachedSequence) -> None:
        """Remove an entry and its sequence without saving it."""
        self._cache.remove(entry)
        self.remove_sequences([entry.seq_id])
        self._on_removed()

    def remove_sequences(self, seq_ids: Iterable[int]) -> None:
        """Remove sequences that belong to the cache and have no entry."""
        for seq_id in seq_ids:
            self._offload.cancel_transfers(seq_id)
            self._sequences.remove(seq_id)
            self._pool.free_sequence(seq_id)

    # ---- restored entries, see `SlotRestorer`

    def n_copyable(self, tokens: bytes, scope: Scope) -> int:
        """Return how many of these packed tokens need not be loaded, because a sequence on the device holds them."""
        return self._cache.match(tokens, scope).n_held if self._sequences.can_save_parts else 0

    def begin_restore(self, tokens: bytes, scope: Scope, hidden: Scope) -> tuple[CachedSequence, int]:
        """Reserve an entry with cells for all of the packed tokens, and copy the prefix that the device already holds.

        The entry counts as in transfer: it is not evicted or saved. A job that needs its cells waits until the transfer
        is finished. `KvMemory.make_room_for_entry` must have returned AVAILABLE.

        Args:
            tokens: The packed tokens that the entry will hold.
            scope: The jobs whose cells may be copied.
            hidden: A scope that no job has. The entry has this scope until `finish_restore`, so that no job finds the
                entry.

        Returns:
            The entry, and the number of its tokens whose cells were copied. The caller loads the cells of the other
            tokens.
        """
        seq_id = self._pool.acquire_for_cache()
        n_copied = 0
        match = self._cache.match(tokens, scope)
        if self._sequences.can_save_parts and match.source is not None:
            n_copied = self._sequences.copy(match.source.seq_id, seq_id, match.n_held)
            self._pool.share(match.source.seq_id, seq_id, n_copied)
        self._pool.resize(seq_id, len(tokens) // TOKEN_BYTES)
        entry = self.insert(seq_id, tokens, hidden)
        if entry is None:
            raise LookupError(f"another entry of the hidden scope has the same tokens: {hidden!r}")
        entry.in_transfer = True
        return entry, n_copied

    def finish_restore(self, entry: CachedSequence, scope: Scope) -> None:
        """Make a restored entry available to the jobs of `scope`."""
        self._cache.remove(entry)
        self.insert(entry.seq_id, entry.tokens, scope)

    def __repr__(self) -> str:
        return f"<CachedEntries {len(self)} entries>"
