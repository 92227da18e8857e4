"""The prefix cache: who on the device holds, or is computing, the beginning of a prompt.

It only decides: it knows packed tokens, sequence ids and runs, and `Memory` does what it says. A finished job's
sequence becomes an entry; an entry and a running job are found alike, by the longest common beginning. What must not
be shared is never compared: every namespace has an index of its own, and one more holds what is public.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.slot import Run
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.radix_tree import RadixTree


@dataclass(slots=True, eq=False)
class Entry:
    """A kept sequence that holds exactly these packed tokens."""

    seq_id: int
    tokens: bytes
    scope: Scope
    leaving: bool = False
    """It is on its way to the next tier, and can still be copied until it is there."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"<Entry seq={self.seq_id} {self.n_tokens} tokens{' leaving' if self.leaving else ''}>"


@dataclass(frozen=True, slots=True)
class Found:
    """What the device has of a prompt: `n_tokens` in `source` now, and `n_coming` in `leader` soon."""

    n_tokens: int = 0
    source: Entry | Run | None = None
    n_coming: int = 0
    leader: Run | None = None


class PrefixCache(Protocol):
    """Which sequences are kept, and for which tokens.

    Ownership: a sequence belongs to a job or to the cache, never to both. `insert` takes one over; what `insert`
    returns and what `remove` is called for is the caller's again, to remove it from KV memory.

    Sharing: a job never writes to a kept sequence. It gets its own, into which the matched cells are copied (with one
    pool of cells a copy shares them, so an entry may go while the job goes on).
    """

    def __len__(self) -> int:
        """Entries."""

    def begin(self, run: Run) -> None:
        """The run may be shared with from now on, as far as it has come."""

    def end(self, run: Run) -> None:
        """The run left its slot."""

    def match(self, tokens: bytes, scope: Scope, order: int | None = None) -> Found:
        """The longest beginning of `tokens` that somebody holds now, and the longest that a run will have computed.

        Only runs that were admitted before number `order` are waited for (None: all), so that no two wait for each
        other. An entry that is found counts as used now; nothing else changes.
        """

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> list[int]:
        """Keep a sequence that holds exactly `tokens`.

        Returns the sequences that are not needed now: those whose tokens another entry begins with, perhaps `seq_id`
        itself.
        """

    def coldest(self) -> Entry | None:
        """The entry that was used longest ago, those that are leaving already aside; None when there is none."""

    def entries(self) -> list[Entry]:
        """All entries, the coldest first."""

    def remove(self, entry: Entry) -> None:
        """Forget the entry."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` when what the cache knows contradicts itself."""


class NullPrefixCache:
    """Keeps and finds nothing: every prompt is computed in full."""

    def __len__(self) -> int:
        return 0

    def begin(self, run: Run) -> None:
        pass

    def end(self, run: Run) -> None:
        pass

    def match(self, tokens: bytes, scope: Scope, order: int | None = None) -> Found:  # noqa: ARG002 - the interface's
        return Found()

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> list[int]:  # noqa: ARG002 - the interface's
        return [seq_id]

    def coldest(self) -> Entry | None:
        return None

    def entries(self) -> list[Entry]:
        return []

    def remove(self, entry: Entry) -> None:
        raise LookupError(f"{entry!r} is not kept")

    def check_integrity(self) -> None:
        pass


PUBLIC = None
"""The name of the index of public beginnings; the others have the keys of their namespaces."""


class RadixPrefixCache:
    """Keeps every finished job's sequence until it has to go, and finds the longest beginning in a radix tree.

    Args:
        can_cut: Whether a copy may end anywhere. Recurrent state cannot be cut: there an entry is of use only with
            all its tokens, and a run only exactly as far as it has come.
    """

    def __init__(self, *, can_cut: bool = True) -> None:
        self._can_cut = can_cut
        self._indexes: defaultdict[bytes | None, RadixTree[Entry | Run]] = defaultdict(RadixTree)
        self._entries: dict[int, Entry] = {}
        """By sequence, the coldest first."""

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, run: Run) -> None:
        self._add(run.packed, run.job.scope, run)

    def end(self, run: Run) -> None:
        self._discard(run.packed, run.job.scope, run)

    def match(self, tokens: bytes, scope: Scope, order: int | None = None) -> Found:
        found = self._match_in(scope.key, tokens, order)
        if scope.public:
            public = self._match_in(PUBLIC, tokens[: scope.public * TOKEN_BYTES], order)
            held = max(found, public, key=lambda part: part.n_tokens)
            coming = max(found, public, key=lambda part: part.n_coming)
            found = Found(held.n_tokens, held.source, coming.n_coming, coming.leader)
        if isinstance(found.source, Entry):
            self._touch(found.source)
        return found

    def insert(self, seq_id: int, tokens: bytes, scope: Scope) -> list[int]:
        entry = Entry(seq_id, tokens, scope)
        superfluous: list[Entry] = []
        for n_common, other in self._indexes[scope.key].matches(tokens):
            if not isinstance(other, Entry) or other.scope.public != scope.public:
                continue
            if n_common == entry.n_tokens and (self._can_cut or other.n_tokens == n_common):
                self._touch(other)
                return [seq_id]
            if self._can_cut and n_common == other.n_tokens:
                superfluous.append(other)
        for other in superfluous:
            self.remove(other)
        self._entries[seq_id] = entry
        self._add(tokens, scope, entry)
        return [other.seq_id for other in superfluous]

    def coldest(self) -> Entry | None:
        return next((entry for entry in self._entries.values() if not entry.leaving), None)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.seq_id]
        self._discard(entry.tokens, entry.scope, entry)

    def check_integrity(self) -> None:
        for index in self._indexes.values():
            index.check_integrity()
        for seq_id, entry in self._entries.items():
            if entry.seq_id != seq_id or not entry.tokens:
                raise AssertionError(f"{entry!r} is kept as sequence {seq_id}")
            if entry not in (holder for _, holder in self._indexes[entry.scope.key].matches(entry.tokens)):
                raise AssertionError(f"{entry!r} cannot be found")

    def _match_in(self, index: bytes | None, tokens: bytes, order: int | None) -> Found:
        n_held = n_coming = 0
        source: Entry | Run | None = None
        leader: Run | None = None
        if index not in self._indexes:
            return Found()
        for n_common, holder in self._indexes[index].matches(tokens):
            if n_common <= n_held:
                break  # what follows has less in common
            n_usable = self._usable(holder, n_common)
            if n_usable > n_held:
                n_held, source = n_usable, holder
            if isinstance(holder, Run) and n_common > max(n_coming, holder.n_past) and _is_before(holder, order):
                n_coming, leader = n_common, holder
        return Found(n_held, source, n_coming, leader)

    def _usable(self, holder: Entry | Run, n_common: int) -> int:
        """How many of the tokens in common can be copied now."""
        n_held = holder.n_tokens if isinstance(holder, Entry) else holder.n_past
        if self._can_cut:
            return min(n_held, n_common)
        return n_held if n_held <= n_common else 0

    def _touch(self, entry: Entry) -> None:
        self._entries[entry.seq_id] = self._entries.pop(entry.seq_id)

    def _add(self, tokens: bytes, scope: Scope, holder: Entry | Run) -> None:
        self._indexes[scope.key].add(tokens, holder)
        if scope.public:
            self._indexes[PUBLIC].add(tokens[: scope.public * TOKEN_BYTES], holder)

    def _discard(self, tokens: bytes, scope: Scope, holder: Entry | Run) -> None:
        parts = [(scope.key, tokens), (PUBLIC, tokens[: scope.public * TOKEN_BYTES])]
        for name, part in parts if scope.public else parts[:1]:
            index = self._indexes[name]
            index.remove(part, holder)
            if not len(index):
                del self._indexes[name]

    def __repr__(self) -> str:
        return f"<RadixPrefixCache {len(self._entries)} entries>"


def _is_before(run: Run, order: int | None) -> bool:
    return order is None or run.admission_number < order
