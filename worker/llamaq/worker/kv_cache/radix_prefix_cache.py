"""Finds the sequences on the device that hold, or will hold, a prefix of a prompt.

The sequence of a finished job becomes an entry. A lookup searches entries and running jobs together for the longest
common prefix. Each namespace has its own index, and one more index contains the public prefixes. A lookup compares a
prompt with the tokens of its own namespace. It compares the public tokens of the prompt also with the public tokens of
other namespaces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, DeviceMatch
from llamaq.worker.kv_cache.radix_tree import RadixTree

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
        match = self._match(tokens, scope, admitted_before, None)
        if isinstance(match.source, CachedSequence):
            self.touch(match.source)
        return match

    def match_runs(self, tokens: bytes, scope: Scope, runs: AbstractSet[Run]) -> DeviceMatch:
        return self._match(tokens, scope, None, runs)

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

    def _match(
        self, tokens: bytes, scope: Scope, admitted_before: int | None, only: AbstractSet[Run] | None
    ) -> DeviceMatch:
        """Search the namespace and the public prefixes. `only` restricts the search to these runs."""
        match = self._match_in(scope.key, tokens, admitted_before, only)
        if not scope.public:
            return match
        public = self._match_in(PUBLIC_INDEX, tokens[: scope.public * TOKEN_BYTES], admitted_before, only)
        held = max(match, public, key=lambda part: part.n_held)
        coming = max(match, public, key=lambda part: part.n_coming)
        return DeviceMatch(held.n_held, held.source, coming.n_coming, coming.leader)

    def _match_in(
        self, index: bytes | None, tokens: bytes, admitted_before: int | None, only: AbstractSet[Run] | None
    ) -> DeviceMatch:
        n_held = n_coming = 0
        source: CachedSequence | Run | None = None
        leader: Run | None = None
        if index not in self._indexes:
            return DeviceMatch()
        for n_common, holder in self._indexes[index].matches(tokens):
            if n_common <= n_held:
                break  # all later holders share at most `n_common` tokens with the prompt
            if only is not None and holder not in only:
                continue
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
    """Whether jobs may wait for the prefill of the run. A prompt that is scored gets only few tokens in each tick."""
    if run.scores_prompt:
        return False
    return admitted_before is None or run.admission_number < admitted_before
