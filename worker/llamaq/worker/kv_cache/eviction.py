"""Evicts cached entries from the device, to make room for waiting jobs and to keep running jobs fast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from llamaq.worker.core.admission import Evicted
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, PrefixCache
from llamaq.worker.kv_cache.prefix_lookup import Candidate, PrefixLookup
from llamaq.worker.kv_cache.slot_pool import SlotPool

MIN_ADOPTED_SHARE = 0.5
"""A job adopts the sequence of an entry only if it reuses at least this share of the entry's tokens. The cells of the
other tokens are lost."""


class Room(Enum):
    """Whether a sequence and enough cells are available for a job or an entry."""

    AVAILABLE = "available"
    PENDING = "pending"
    """Not yet: entries are in transfer. The caller should ask again when their transfers have finished."""
    UNAVAILABLE = "unavailable"
    """Running jobs need the sequences or cells, so no eviction can make enough room."""


class Eviction:
    """Evicts the least recently used entry first: saves its cells to the next tier, if one exists, then removes them.

    Args:
        pool: The slots, sequences and cells.
        cache: The entries on the device.
        lookup: Repeats a candidate's lookup when its hit has become stale.
        offload: The tiers behind the device: host memory and disk.
        drop: Removes an entry and its sequence.
        held_cells: Upper bound on the cells that only entries hold, while jobs run. None means no bound.
    """

    def __init__(
        self,
        pool: SlotPool,
        cache: PrefixCache,
        lookup: PrefixLookup,
        offload: Offload,
        drop: Callable[[CachedSequence], None],
        *,
        held_cells: int | None,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._lookup = lookup
        self._offload = offload
        self._drop = drop
        self._held_cells = pool.n_cells if held_cells is None else held_cells
        self._needs_trim = False
        self._to_save_ahead: deque[CachedSequence] | None = None
        """The entries that are not saved yet and that `trim` will evict for the next job. None: not known."""
        self._evicted_for_jobs: list[Evicted] = []
        self.n_evicted = 0

    # ---- room for a waiting job or a restored entry

    def make_room(self, candidate: Candidate) -> Room:
        """Return whether the candidate can be admitted, and evict entries if this makes room. A slot must be idle.

        The entry that matches the candidate's prompt counts as used now, so it is evicted last. If even this
        entry is evicted, the candidate's hit is stale and is replaced by the result of a new lookup.
        """
        self._refresh(candidate)  # the entry may have been evicted for another candidate
        if candidate.hit.matched_entry is not None:
            self._cache.touch(candidate.hit.matched_entry)
        while not self._can_admit(candidate):
            if not self._could_admit_without_entries(candidate):
                return Room.UNAVAILABLE
            if self._must_not_evict(self._missing_cells(candidate)):
                return Room.PENDING
            if (entry := self.evict_coldest()) is not None:
                self._evicted_for_jobs.append(Evicted(entry.seq_id, entry.n_tokens))
            self._refresh(candidate)
        return Room.AVAILABLE

    def take_evicted(self) -> tuple[Evicted, ...]:
        """Return what `make_room` has evicted for waiting jobs since the last call."""
        evicted, self._evicted_for_jobs = tuple(self._evicted_for_jobs), []
        return evicted

    def make_room_for_entry(self, n_cells: int) -> Room:
        """Return whether one more entry with `n_cells` new cells can be cached. Evicts other entries to make room."""
        while True:
            n_missing = self._pool.missing_cells(n_cells)
            if self._pool.n_free_sequences and not n_missing:
                return Room.AVAILABLE
            if self._must_not_evict(n_missing):
                return Room.PENDING if self._in_transfer() else Room.UNAVAILABLE
            self.evict_coldest()

    def adoptable(self, candidate: Candidate) -> CachedSequence | None:
        """Return the entry whose sequence the job takes over, or None when no sequence can be taken over.

        A job adopts a sequence only if no sequence is free and the job reuses at least half of the entry.
        """
        entry = candidate.hit.source
        if self._pool.n_free_sequences or not isinstance(entry, CachedSequence) or entry.in_transfer:
            return None
        return entry if candidate.hit.n_held >= MIN_ADOPTED_SHARE * entry.n_tokens else None

    def _refresh(self, candidate: Candidate) -> None:
        """Repeat the candidate's lookup if its entry was evicted. Otherwise the hit is still valid."""
        entry = candidate.hit.matched_entry
        if entry is not None and entry not in self._cache:
            candidate.hit = self._lookup.find(candidate.job)

    def _missing_cells(self, candidate: Candidate) -> int:
        return self._pool.missing_cells(self._pool.cells_to_admit(candidate.job) - candidate.hit.n_held)

    def _can_admit(self, candidate: Candidate) -> bool:
        has_sequence = self._pool.n_free_sequences > 0 or self.adoptable(candidate) is not None
        return has_sequence and self._missing_cells(candidate) == 0

    def _could_admit_without_entries(self, candidate: Candidate) -> bool:
        return self._missing_cells(candidate) <= self._pool.ledger.owned_together(self._pool.cached)

    def _in_transfer(self) -> list[CachedSequence]:
        return [entry for entry in self._cache.entries() if entry.in_transfer]

    def _must_not_evict(self, n_missing: int) -> bool:
        """Whether no further entry is evicted for `n_missing` cells and a sequence.

        This is so if the entries in transfer will free enough of them, or if no other entry can be evicted.
        """
        in_transfer = {entry.seq_id for entry in self._in_transfer()}
        n_cells = self._pool.ledger.owned_together(in_transfer)
        has_sequence = bool(in_transfer or self._pool.n_free_sequences)
        return (has_sequence and n_cells >= n_missing) or self._cache.coldest() is None

    # ---- speed of the running jobs

    def request_trim(self) -> None:
        """Make the next `trim` check the limits.

        Called after a job was admitted, after an entry was added or removed, and after a run has lost cells that an
        entry may have shared.
        """
        self._needs_trim = True
        self._to_save_ahead = None

    def trim(self) -> None:
        """Evict entries until their cells are within `held_cells` and each idle slot has a free sequence.

        If the margins of the running jobs do not fit beside the entries, further entries are evicted. So their cells
        are saved and free when the jobs need them.

        Does nothing while no job runs: entries slow down no tick then, and the next job may reuse them.
        """
        if not self._pool.active_slots:
            return
        while (n_missing := self._pool.missing_cells(0)) and not self._must_not_evict(n_missing):
            self.evict_coldest()
        if not self._needs_trim:
            return
        self._needs_trim = False
        while (staying := self._evictable()) and not self._are_within_limits(staying):
            self.evict_coldest()

    def save_ahead(self) -> bool:
        """Save one block of the entries that `trim` will evict when the next job runs. They stay on the device.

        Called while no job runs. The next job then need not wait until they are saved.

        Returns:
            False if there is nothing to save, or if the disk has to write first.
        """
        if self._to_save_ahead is None:
            self._to_save_ahead = deque(self._next_to_evict())
        while self._to_save_ahead and self._offload.can_save_ahead:
            entry = self._to_save_ahead[0]
            if entry in self._cache and self._offload.save_ahead(entry):
                return True
            self._to_save_ahead.popleft()
        return False

    def stop_saving_ahead(self) -> None:
        """Save nothing ahead until the cache changes."""
        self._to_save_ahead = deque()

    def _next_to_evict(self) -> list[CachedSequence]:
        """Return the entries that `trim` would evict if a job ran, in this order."""
        entries = self._evictable()
        for n_evicted in range(len(entries)):
            if self._are_within_limits(entries[n_evicted:]):
                return entries[:n_evicted]
        return entries

    def _evictable(self) -> list[CachedSequence]:
        """Return the entries that are not in transfer, the least recently used first."""
        return [entry for entry in self._cache.entries() if not entry.in_transfer]

    def _are_within_limits(self, staying: list[CachedSequence]) -> bool:
        """Whether no entry has to be evicted for the speed of running jobs, if only the entries in `staying` remain.

        Their cells are within `held_cells`, and as many sequences are free, or soon will be, as slots are idle. If
        there are only as many sequences as slots, none has to be free: jobs then take over the sequences of entries.
        """
        n_free = self._pool.n_free_sequences + len(self._cache) - len(staying)
        has_sequences = not self._pool.has_spare_sequences or n_free >= self._pool.n_idle
        seq_ids = {entry.seq_id for entry in staying}
        return has_sequences and self._pool.ledger.owned_together(seq_ids) <= self._held_cells

    # ---- one entry

    def evict_coldest(self) -> CachedSequence | None:
        """Start to save the least recently used entry. If there is nothing to save, remove the entry at once.

        Returns:
            The entry, or None when there is none.
        """
        if (entry := self._cache.coldest()) is not None:
            self.n_evicted += 1
            entry.in_transfer = True
            if not self._offload.start_save(entry):
                self._drop(entry)
        return entry

    def drop_coldest(self) -> bool:
        """Remove the least recently used entry at once, without saving it. Returns False when there is no entry."""
        entry = self._cache.coldest(include_in_transfer=True)
        if entry is not None:
            self.n_evicted += 1
            self._drop(entry)
        return entry is not None

    def __repr__(self) -> str:
        return f"<Eviction {self.n_evicted} evicted, at most {self._held_cells} cells held>"
