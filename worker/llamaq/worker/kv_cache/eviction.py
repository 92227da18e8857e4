"""Who has to leave the device: kept sequences give way to jobs, and to the speed of running ones."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from llamaq.worker.core.job import Job
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache import Entry, PrefixCache
from llamaq.worker.kv_cache.prefix_lookup import PrefixHit
from llamaq.worker.kv_cache.slot_pool import SlotPool

ADOPTED_SHARE = 0.5
"""A job goes on in an entry's own sequence only if it needs at least this share of it: the rest is lost."""


class Room(Enum):
    """Whether a job can enter."""

    NOW = "now"
    SOON = "soon"
    """Entries are leaving for it."""
    NONE = "none"


class Eviction:
    """Lets entries go, the one used longest ago first: to the next tier, where it takes a while, or for good."""

    def __init__(
        self,
        pool: SlotPool,
        cache: PrefixCache,
        tiers: Offload,
        drop: Callable[[Entry], None],
        *,
        held_cells: int | None,
    ) -> None:
        """`drop` removes an entry's sequence; see `Memory` for `held_cells`."""
        self._pool = pool
        self._cache = cache
        self._tiers = tiers
        self._drop = drop
        self._held_cells = pool.n_cells if held_cells is None else held_cells
        self.is_trimmed = True
        """Nothing has come since `trim` looked."""
        self.n_evicted = 0

    # ---- for a job that waits

    def make_room(self, job: Job, way: PrefixHit) -> Room:
        """Whether the job, whose slot is idle, can enter by this way; entries give way to it where that helps."""
        if self._can_enter(job, way):
            return Room.NOW
        if not self._could_enter(job, way):
            return Room.NONE
        while not self._can_enter(job, way) and not self._is_enough_leaving(self._missing(job, way)):
            self.let_coldest_go()
        return Room.NOW if self._can_enter(job, way) else Room.SOON

    def adoptable(self, way: PrefixHit) -> Entry | None:
        """The entry in whose own sequence the job goes on: where no other is free, and most of it is needed."""
        entry = way.source
        if self._pool.n_free or not isinstance(entry, Entry) or entry.leaving:
            return None
        return entry if way.n_held >= ADOPTED_SHARE * entry.n_tokens else None

    def make_way(self, n_cells: int) -> Room:
        """Whether one more sequence can be kept, with so many cells of its own; entries give way to it."""
        while True:
            n_missing = self._pool.missing(n_cells)
            if self._pool.n_free and not n_missing:
                return Room.NOW
            if self._is_enough_leaving(n_missing):
                break
            self.let_coldest_go()
        return Room.SOON if any(entry.leaving for entry in self._cache.entries()) else Room.NONE

    def _missing(self, job: Job, way: PrefixHit) -> int:
        return self._pool.missing_cells(job, way.n_held)

    def _can_enter(self, job: Job, way: PrefixHit) -> bool:
        has_sequence = self._pool.n_free > 0 or self.adoptable(way) is not None
        return has_sequence and self._missing(job, way) == 0

    def _could_enter(self, job: Job, way: PrefixHit) -> bool:
        """Whether there would be room without the entries."""
        gone = self._pool.ledger.owned_together(self._pool.kept)
        return self._pool.could_acquire(job) or self._missing(job, way) <= gone

    def _is_enough_leaving(self, n_missing: int) -> bool:
        """Whether nothing more has to be evicted: what is leaving makes the room, or there is nothing else."""
        leaving = {entry.seq_id for entry in self._cache.entries() if entry.leaving}
        cells = self._pool.ledger.owned_together(leaving)
        return (bool(leaving or self._pool.n_free) and cells >= n_missing) or self._cache.coldest() is None

    # ---- for those that run

    def trim(self) -> None:
        """Let entries go beyond what may be held beside running jobs.

        They cost nothing while no job runs, and the next one may be their conversation's: then they stay.
        """
        if self.is_trimmed or not self._pool.active:
            return
        self.is_trimmed = True
        while self._cache.coldest() is not None and (self._excess_cells() > 0 or self._lacks_sequences()):
            self.let_coldest_go()

    def _excess_cells(self) -> int:
        staying = {entry.seq_id for entry in self._cache.entries() if not entry.leaving}
        return self._pool.ledger.owned_together(staying) - self._held_cells

    def _lacks_sequences(self) -> bool:
        """Whether idle slots would have to wait for a sequence; where there is none to spare they adopt one."""
        n_leaving = sum(entry.leaving for entry in self._cache.entries())
        return self._pool.has_spare_sequences and self._pool.n_free + n_leaving < self._pool.n_idle

    # ---- one entry

    def let_coldest_go(self) -> None:
        """Begin to move the coldest entry to the next tier; where there is none it goes at once."""
        if (entry := self._cache.coldest()) is not None:
            self.n_evicted += 1
            entry.leaving = True
            if not self._tiers.keep(entry):
                self._drop(entry)

    def drop_coldest(self) -> bool:
        """Forget an entry at once, for cells that are needed now; False when there is none."""
        entry = next(iter(self._cache.entries()), None)
        if entry is not None:
            self.n_evicted += 1
            self._drop(entry)
        return entry is not None

    def __repr__(self) -> str:
        return f"<Eviction {self.n_evicted} evicted, {self._held_cells} cells may stay>"
