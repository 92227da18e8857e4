"""The prefix cache: finds the sequences on the device that hold, or will hold, a prefix of a prompt.

The cache only keeps records: packed tokens, sequence ids and runs. `KvMemory` changes the sequences. The sequence of a
finished job becomes an entry. A lookup searches entries and running jobs together for the longest common prefix.
Each namespace has its own index, and one more index contains the public prefixes. A lookup compares a prompt with the
tokens of its own namespace. It compares the public tokens of the prompt also with the public tokens of other
namespaces.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.radix_tree import RadixTree


@dataclass(slots=True, eq=False)
class CachedSequence:
    """An entry of the prefix cache: a sequence that holds the cells of exactly these packed tokens."""

    seq_id: int
    tokens: bytes
    scope: Scope
    in_transfer: bool = False
    """Whether the entry's cells are being saved to the next tier or loaded from a file. The cells can be copied while
    they are saved."""
    n_adjacent: int = sys.maxsize
    """The cells after the first `n_adjacent` tokens are scattered, because the tokens were generated beside others."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens whose cells the sequence holds."""
        return len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"<CachedSequence seq={self.seq_id} {self.n_tokens} tokens{' in transfer' if self.in_transfer else ''}>"


@dataclass(frozen=True, slots=True)
class DeviceMatch:
    """The longest prefix of a prompt that the device holds now, and the longest prefix that a running job will
    compute.
    """

    n_held: int = 0
    """Number of tokens of the prompt whose cells `source` holds now."""
    source: CachedSequence | Run | None = None
    n_coming: int = 0
    """Number of tokens of the prompt whose cells `leader` will hold after its prefill."""
    leader: Run | None = None


class PrefixCache(Protocol):
    """The cached sequences, and the tokens that each of them holds.

    Ownership: a sequence belongs either to a job or to the cache. `insert` takes ownership. The caller owns each
    sequence that `insert` returns, and the sequence of an entry after `remove`. The caller removes these sequences from
    KV memory.

    Sharing: a job never writes to a cached sequence. The matched cells are copied to the job's sequence. If all
    sequences use one pool of cells, the copy shares the cells, so an entry may be evicted while the job still runs.
    """

    def __len__(self) -> int:
        """Return the number of entries."""

    def __contains__(self, entry: CachedSequence) -> bool:
        """Whether the entry is still cached."""

    def add_run(self, run: Run) -> None:
        """Make the tokens of a running job available to lookups."""

    def remove_run(self, run: Run) -> None:
        """Remove a running job from lookups."""

    def match(self, tokens: bytes, scope: Scope, admitted_before: int | None = None) -> DeviceMatch:
        """Return the longest prefix of `tokens` that is held now, and the longest prefix that a run will compute.

        A matched entry counts as used. Nothing else changes.

        Args:
            tokens: The packed tokens of the prompt.
            scope: The jobs that may share the prompt's cells.
            admitted_before: Only runs with a smaller admission number can be the leader, so that no two runs wait for
                each other. None allows every run.
        """

    def touch(self, entry: CachedSequence) -> None:
        """Count the entry as used now."""

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> list[int]:
        """Add the sequence, which holds exactly `tokens`, as the most recently used entry.

        Returns:
            The redundant sequences, which may include `seq_id`: the tokens of each are a prefix of another entry's
            tokens.
        """

    def entry_of(self, seq_id: int) -> CachedSequence | None:
        """Return the entry of a sequence, or None when the cache does not own the sequence."""

    def coldest(self, *, include_in_transfer: bool = False) -> CachedSequence | None:
        """Return the least recently used entry, or None. Entries in transfer are skipped by default."""

    def entries(self) -> list[CachedSequence]:
        """Return all entries, the least recently used first."""

    def remove(self, entry: CachedSequence) -> None:
        """Remove the entry."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` when entries and indexes contradict each other."""


class NullPrefixCache:
    """A prefix cache that stores nothing, so every prompt is computed in full. `PrefixCache` documents the methods."""

    def __len__(self) -> int:
        return 0

    def __contains__(self, entry: CachedSequence) -> bool:
        return False

    def add_run(self, run: Run) -> None:
        pass

    def remove_run(self, run: Run) -> None:
        pass

    def match(
        self,
        tokens: bytes,  # noqa: ARG002 - the interface's
        scope: Scope,  # noqa: ARG002 - the interface's
        admitted_before: int | None = None,  # noqa: ARG002 - the interface's
    ) -> DeviceMatch:
        return DeviceMatch()

    def touch(self, entry: CachedSequence) -> None:
        raise LookupError(f"{entry!r} is not cached")

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> list[int]:  # noqa: ARG002 - the interface's
        return [seq_id]

    def entry_of(self, seq_id: int) -> CachedSequence | None:  # noqa: ARG002 - the interface's
        return None

    def coldest(self, *, include_in_transfer: bool = False) -> CachedSequence | None:  # noqa: ARG002 - the interface's
        return None

    def entries(self) -> list[CachedSequence]:
        return []

    def remove(self, entry: CachedSequence) -> None:
        raise LookupError(f"{entry!r} is not cached")

    def check_integrity(self) -> None:
        pass


PUBLIC_INDEX = None
"""Key of the index of public prefixes. The key of every other index is the key of its namespace."""


class RadixPrefixCache:
    """Caches the sequence of every finished job until it is evicted, and finds prefixes in a radix tree.

    `PrefixCache` documents the methods.

    Args:
        can_cut: Whether a copy may end at any token. False for a recurrent state. Then a prompt can use an entry only
            if it begins with all tokens of the entry. It can use a run only if it begins with all tokens that the run
            has computed so far.
    """

    def __init__(self, *, can_cut: bool = True) -> None:
        self._can_cut = can_cut
        self._indexes: defaultdict[bytes | None, RadixTree[CachedSequence | Run]] = defaultdict(RadixTree)
        self._entries: dict[int, CachedSequence] = {}
        """Maps a sequence to its entry. The least recently used entry is the first."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: CachedSequence) -> bool:
        return self._entries.get(entry.seq_id) is entry

    def add_run(self, run: Run) -> None:
        self._add(run.packed, run.job.scope, run)

    def remove_run(self, run: Run) -> None:
        self._discard(run.packed, run.job.scope, run)

    def match(self, tokens: bytes, scope: Scope, admitted_before: int | None = None) -> DeviceMatch:
        match = self._match_in(scope.key, tokens, admitted_before)
        if scope.public:
            public = self._match_in(PUBLIC_INDEX, tokens[: scope.public * TOKEN_BYTES], admitted_before)
            held = max(match, public, key=lambda part: part.n_held)
            coming = max(match, public, key=lambda part: part.n_coming)
            match = DeviceMatch(held.n_held, held.source, coming.n_coming, coming.leader)
        if isinstance(match.source, CachedSequence):
            self.touch(match.source)
        return match

    def touch(self, entry: CachedSequence) -> None:
        self._entries[entry.seq_id] = self._entries.pop(entry.seq_id)

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> list[int]:
        entry = CachedSequence(seq_id, tokens, scope)
        redundant: list[CachedSequence] = []
        for n_common, other in self._indexes[scope.key].matches(tokens):
            if not isinstance(other, CachedSequence) or other.scope.public != scope.public:
                continue
            if n_common == entry.n_tokens and (self._can_cut or other.n_tokens == n_common):
                self.touch(other)
                return [seq_id]
            if self._can_cut and n_common == other.n_tokens:
                redundant.append(other)
        for other in redundant:
            self.remove(other)
        self._entries[seq_id] = entry
        self._add(tokens, scope, entry)
        return [other.seq_id for other in redundant]

    def entry_of(self, seq_id: int) -> CachedSequence | None:
        return self._entries.get(seq_id)

    def coldest(self, *, include_in_transfer: bool = False) -> CachedSequence | None:
        return next((entry for entry in self._entries.values() if include_in_transfer or not entry.in_transfer), None)

    def entries(self) -> list[CachedSequence]:
        return list(self._entries.values())

    def remove(self, entry: CachedSequence) -> None:
        del self._entries[entry.seq_id]
        self._discard(entry.tokens, entry.scope, entry)

    def check_integrity(self) -> None:
        for index in self._indexes.values():
            index.check_integrity()
        for seq_id, entry in self._entries.items():
            if entry.seq_id != seq_id or not entry.tokens:
                raise AssertionError(f"{entry!r} is cached as sequence {seq_id}")
            if entry not in (holder for _, holder in self._indexes[entry.scope.key].matches(entry.tokens)):
                raise AssertionError(f"{entry!r} cannot be found")

    def _match_in(self, index: bytes | None, tokens: bytes, admitted_before: int | None) -> DeviceMatch:
        n_held = n_coming = 0
        source: CachedSequence | Run | None = None
        leader: Run | None = None
        if index not in self._indexes:
            return DeviceMatch()
        for n_common, holder in self._indexes[index].matches(tokens):
            if n_common <= n_held:
                break  # all later holders share at most `n_common` tokens with the prompt
            n_usable = self._usable(holder, n_common)
            if n_usable > n_held:
                n_held, source = n_usable, holder
            if (
                isinstance(holder, Run)
                and n_common > max(n_coming, holder.n_past)
                and _can_lead(holder, admitted_before)
            ):
                n_coming, leader = n_common, holder
        return DeviceMatch(n_held, source, n_coming, leader)

    def _usable(self, holder: CachedSequence | Run, n_common: int) -> int:
        """Return how many of the common tokens can be copied from the holder now."""
        n_held = holder.n_tokens if isinstance(holder, CachedSequence) else holder.n_past
        if self._can_cut:
            return min(n_held, n_common)
        return n_held if n_held <= n_common else 0

    def _add(self, tokens: bytes, scope: Scope, holder: CachedSequence | Run) -> None:
        self._indexes[scope.key].add(tokens, holder)
        if scope.public:
            self._indexes[PUBLIC_INDEX].add(tokens[: scope.public * TOKEN_BYTES], holder)

    def _discard(self, tokens: bytes, scope: Scope, holder: CachedSequence | Run) -> None:
        indexed = [(scope.key, tokens), (PUBLIC_INDEX, tokens[: scope.public * TOKEN_BYTES])]
        for key, part in indexed if scope.public else indexed[:1]:
            index = self._indexes[key]
            index.remove(part, holder)
            if not len(index):
                del self._indexes[key]

    def __repr__(self) -> str:
        return f"<RadixPrefixCache {len(self._entries)} entries>"


def _can_lead(run: Run, admitted_before: int | None) -> bool:
    return admitted_before is None or run.admission_number < admitted_before
