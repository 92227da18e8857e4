"""The prefix cache's interface, and the one that keeps nothing.

A prefix cache decides which sequences of finished jobs stay in KV memory, so that a later job with the same
beginning need not compute it again. It only decides: token ids and sequence ids are all it knows. The scheduler
has the sequences copied and removed in KV memory, and `SlotPool` counts their cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prefix:
    """A kept sequence whose first `n_tokens` tokens equal those that were asked for."""

    seq_id: int
    n_tokens: int


class PrefixCache(Protocol):
    """Which sequences are kept, and for which tokens.

    Ownership: a sequence belongs to a job or to the cache, never to both. `insert` takes one over; `insert` and
    `evict` give some up, and the caller removes those from KV memory before anything else is asked.

    Sharing: a job never writes to a kept sequence. It gets its own, into which the matched cells are copied (with
    one pool of cells a copy shares them, so a kept sequence may go while the job goes on).

    Eviction: any kept sequence may be evicted at any time between two calls of the scheduler. A `Prefix` is
    therefore used at once, and worth nothing after the next `insert` or `evict`.
    """

    def match(self, tokens: Sequence[int]) -> Prefix | None:
        """The longest kept prefix of `tokens`, or None. Mutates nothing but the order of use."""

    def insert(self, tokens: Sequence[int], seq_id: int) -> list[int]:
        """Offer the sequence that holds exactly `tokens`; mutates the cache.

        Returns the sequences that are not needed now: `seq_id` itself when it is not worth keeping, others that
        it makes superfluous, or none.
        """

    def evict(self, n_cells: int) -> list[int]:
        """Give up at least one sequence, and as many, the least valuable first, as hold `n_cells` cells.

        Mutates the cache. Returns the sequences given up: fewer than asked for when nothing is left, none when
        the cache is empty.
        """

    def check_integrity(self) -> None:
        """Raise `AssertionError` when what the cache knows contradicts itself."""


class NullPrefixCache:
    """Keeps nothing: every prompt is computed in full."""

    def match(self, tokens: Sequence[int]) -> Prefix | None:  # noqa: ARG002 - the interface's
        return None

    def insert(self, tokens: Sequence[int], seq_id: int) -> list[int]:  # noqa: ARG002 - the interface's
        return [seq_id]

    def evict(self, n_cells: int) -> list[int]:  # noqa: ARG002 - the interface's
        return []

    def check_integrity(self) -> None:
        return None

    def __repr__(self) -> str:
        return "<NullPrefixCache>"
