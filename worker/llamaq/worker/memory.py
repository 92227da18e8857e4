"""KV memory as the scheduler sees it: jobs enter and leave it, kept prefixes are shared and give way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from llamaq.common.messages import CacheSnapshot
from llamaq.worker.jobs import Job
from llamaq.worker.prefix_cache import PrefixCache
from llamaq.worker.slots import Run, Slot, SlotPool


class Sequences(Protocol):
    """The engine's sequences, as far as they are moved about between ticks."""

    def remove(self, seq_id: int) -> None:
        """Forget the sequence's cells; removing an empty one is allowed."""

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Copy the first `n_tokens` cells into the empty sequence `target`; returns how many it truly holds then."""


class Memory:
    """Brings together who decides about KV memory (pool, prefix cache) and what does it (the engine's sequences)."""

    def __init__(self, pool: SlotPool, sequences: Sequences, cache: PrefixCache) -> None:
        self.pool = pool
        self.cache = cache
        self._sequences = sequences
        self._hits = 0
        self._misses = 0

    def make_room(self, job: Job) -> bool:
        """Whether the job can enter now; kept prefixes give way to it if that is enough."""
        if not self.pool.can_acquire(job) and self.pool.could_acquire(job):
            self._remove(self.cache.evict(self.pool.missing_cells(job)))
        return self.pool.can_acquire(job)

    def enter(self, job: Job, now_s: float) -> Slot:
        """Give the job a slot, a sequence, and the cells of the longest kept prefix of its tokens."""
        slot = self.pool.acquire(job, now_s)
        if job.request.cache_prompt:
            self._reuse(slot.active)
        return slot

    def leave(self, slot: Slot, *, reusable: bool) -> None:
        """Take the job out of its slot. A `reusable` sequence is offered to the prefix cache, others are removed."""
        run = self.pool.release(slot)
        if reusable and run.job.request.cache_prompt and run.n_past:
            self._remove(self.cache.insert(run.tokens[: run.n_past], run.seq_id))
        else:
            self._remove([run.seq_id])

    def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(
            n_cells=self.pool.n_cells,
            reserved_cells=self.pool.reserved_cells + self.pool.kept_cells,
            entries=self.pool.n_kept,
            hits=self._hits,
            misses=self._misses,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` when slots, sequences, cells and cache contradict each other."""
        self.pool.check_integrity()
        self.cache.check_integrity()

    def _reuse(self, run: Run) -> None:
        # The last token is always computed: its logits give the next one.
        if prefix := self.cache.match(run.tokens[:-1]):
            run.n_past = run.cached_tokens = self._sequences.copy(prefix.seq_id, run.seq_id, prefix.n_tokens)
        if run.cached_tokens:
            self._hits += 1
        else:
            self._misses += 1

    def _remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._sequences.remove(seq_id)
            self.pool.reclaim(seq_id)

    def __repr__(self) -> str:
        pool = self.pool
        return f"<Memory {pool.reserved_cells} reserved + {pool.kept_cells} kept of {pool.n_cells} cells>"
