"""The interface between `KvMemory` and the prefix cache: the sequences on the device that later jobs can reuse.

The cache only keeps records: packed tokens, sequence ids and runs. `KvMemory` changes the sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.slot import Run


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

    def match_runs(self, tokens: bytes, scope: Scope, runs: AbstractSet[Run]) -> DeviceMatch:
        """Return what `match` would return if only these runs existed, and no entry. Nothing changes."""

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

    def match_runs(
        self,
        tokens: bytes,  # noqa: ARG002 - the interface's
        scope: Scope,  # noqa: ARG002 - the interface's
        runs: AbstractSet[Run],  # noqa: ARG002 - the interface's
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
