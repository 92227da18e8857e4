"""The KV memory of a worker: it admits and releases jobs, and lets later jobs reuse the cells of earlier jobs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot
from llamaq.worker.core.admission import Admission
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.sequence_interface import SequenceOps
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.kv_cache.cached_entries import CachedEntries
from llamaq.worker.kv_cache.eviction import Eviction, Room
from llamaq.worker.kv_cache.offload_interface import NoOffload, Offload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, PrefixCache
from llamaq.worker.kv_cache.prefix_lookup import Candidate, PrefixHit, PrefixLookup
from llamaq.worker.kv_cache.remembered_hits import RememberedHits
from llamaq.worker.kv_cache.slot_pool import SlotPool

STORED_TIERS = (CacheTier.HOST, CacheTier.DISK)


class KvMemory:
    """Applies the decisions about KV cells (slot pool, prefix cache, eviction, offload) to the engine's sequences.

    Args:
        pool: The slots, sequences and cells.
        sequences: The engine's sequences.
        cache: The entries on the device.
        offload: The tiers behind the device. None means that evicted cells are lost.
        held_cells: Upper bound on KV cells held by cached entries alone while jobs run. Attention scans every used
            cell, so idle cells slow each tick. None means no bound.
    """

    def __init__(
        self,
        pool: SlotPool,
        sequences: SequenceOps,
        cache: PrefixCache,
        offload: Offload | None = None,
        *,
        held_cells: int | None = None,
    ) -> None:
        self._pool = pool
        self._sequences = sequences
        self._cache = cache
        self._offload = NoOffload() if offload is None else offload
        self._lookup = PrefixLookup(cache, self._offload, can_save_parts=sequences.can_save_parts)
        self.entries = CachedEntries(
            pool, sequences, cache, self._offload, on_added=self._note_sequence, on_removed=self._request_trim
        )
        """The cached sequences. Slot commands read, add and remove them directly."""
        self._eviction = Eviction(pool, cache, self._lookup, self._offload, self.entries.remove, held_cells=held_cells)
        self._hits_of_waiting = RememberedHits(self._lookup, cache, can_cut=sequences.can_cut)
        self._n_hits = self._n_misses = self._n_hit_tokens = 0

    # ---- slots

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots of the worker."""
        return self._pool.slots

    @property
    def active_slots(self) -> tuple[Slot, ...]:
        """The slots that run a job."""
        return self._pool.active_slots

    def slot_of(self, job: Job) -> Slot | None:
        """Return the slot that runs the job. None: the job waits."""
        return next((slot for slot in self._pool.active_slots if slot.active.job is job), None)

    @property
    def n_cells(self) -> int:
        """Number of KV cells."""
        return self._pool.n_cells

    @property
    def has_entries(self) -> bool:
        """Whether at least one sequence is cached."""
        return len(self._cache) > 0

    @property
    def can_remove_draft(self) -> bool:
        """Whether the last tokens of a sequence can be removed after they were decoded."""
        return self._sequences.can_remove_draft

    @property
    def n_cells_for_drafts(self) -> int:
        """Number of cells that draft tokens may use during a tick. May be negative."""
        return self._pool.unpromised_cells

    def lacks_cells(self, n_ahead: int = 0) -> bool:
        """Whether the running jobs need more cells than exist, for their histories and the next `n_ahead` tokens.

        This happens when jobs grow, and when a job that has lost shared cells computes them again.
        """
        return self._pool.lacks_cells(n_ahead)

    def n_tokens_with_room(self, n_ahead: int) -> int:
        """Return for how many tokens of each running job the free cells suffice.

        After them, entries must be evicted. Without entries, cells for the next `n_ahead` tokens are then missing.
        """
        n_jobs = len(self._pool.active_slots)
        if self.has_entries:
            return max(0, self._pool.free_cells // n_jobs)
        return max(0, self._pool.unpromised_cells // n_jobs - n_ahead)

    def has_slot(self, job: Job) -> bool:
        """Whether a slot that the job can use is idle."""
        return self._pool.has_slot(job)

    def could_admit(self, job: Job, without: Sequence[Slot]) -> bool:
        """Whether there would be room for the job if all entries were evicted and the slots in `without` were idle."""
        if self._pool.could_admit(job, without):  # the usual case, which needs no lookup
            return True
        n_shared = self._n_shared(job, without)
        return n_shared > 0 and self._pool.could_admit(job, without, n_shared=n_shared)

    def _n_shared(self, job: Job, without: Sequence[Slot]) -> int:
        """Return how many cells an admission of the job shares with the jobs in the other slots, at least."""
        n_held = self.find_prefix(job).n_held
        if not n_held:
            return 0
        staying = frozenset(slot.active for slot in self._pool.active_slots if slot not in without)
        return min(n_held, self._lookup.n_held_by(job, staying))

    # ---- admission of a job

    def find_prefix(self, job: Job) -> PrefixHit:
        """Return the reusable prefix of a waiting job's prompt; see `RememberedHits.find`."""
        return self._hits_of_waiting.find(job)

    def forget(self, job: Job) -> None:
        """Forget the reusable prefix of a job that no longer waits."""
        self._hits_of_waiting.forget(job)

    @property
    def remembered_jobs(self) -> set[Job]:
        """The jobs whose reusable prefix is remembered."""
        return self._hits_of_waiting.jobs

    def make_room(self, candidate: Candidate) -> Room:
        """Return whether the candidate can be admitted, and evict entries if this makes room. A slot must be idle.

        If there is room but the hit is not up to date, the lookup is repeated: a sequence may hold more by now.
        """
        room = self._eviction.make_room(candidate)
        if room is not Room.AVAILABLE or self._hits_of_waiting.is_up_to_date(candidate.job):
            return room
        candidate.hit = self._lookup.find(candidate.job)
        return self._eviction.make_room(candidate)

    def admit(self, candidate: Candidate, now_s: float) -> Slot:
        """Give the job a slot, a sequence and the cells that it reuses. `make_room` must have returned AVAILABLE."""
        job, hit = candidate.job, candidate.hit
        adopted = self._eviction.adoptable(candidate)
        slot = self._pool.acquire(job, now_s, adopted.seq_id if adopted else None)
        source = hit.leader or hit.source
        seq_id = source.seq_id if source else None
        slot.active.admission = Admission(hit.n_tokens, hit.tier, seq_id, self._eviction.take_evicted())
        if adopted:
            self._adopt(slot.active, adopted, hit.n_held)
            hit = PrefixHit(stored=hit.stored)
        self._reuse(slot, hit)
        self._hits_of_waiting.forget(job)
        if job.request.cache_prompt:
            self._cache.add_run(slot.active)
            self._hits_of_waiting.add_sequence(slot.active.packed, job.scope)
        self._request_trim()
        return slot

    def resume_followers(self) -> None:
        """Resume the slots in FOLLOW whose leader has computed the shared prefix or has left its slot."""
        following = [slot for slot in self._pool.active_slots if slot.state is SlotState.FOLLOW]
        for slot in sorted(following, key=lambda slot: slot.active.admission_number):
            run = slot.active
            if run.leader is None or run.leader.is_released or run.leader.n_past >= run.awaited_tokens:
                run.leader = None
                slot.transition_to(SlotState.PREFILL)
                self._reuse(slot, self._lookup.find(run.job, admitted_before=run.admission_number))

    def _reuse(self, slot: Slot, hit: PrefixHit) -> None:
        """Wait for the leader of the hit. Without a leader, copy cells on the device and start to load stored cells."""
        run = slot.active
        if hit.leader:
            run.leader, run.awaited_tokens = hit.leader, hit.n_coming
            slot.transition_to(SlotState.FOLLOW)
            if not self._sequences.can_cut and hit.n_coming not in hit.leader.checkpoints:
                insort(hit.leader.checkpoints, hit.n_coming)
            return
        if hit.source:
            self._copy(hit.source, run, hit.n_held)
        if hit.stored:
            slot.transition_to(SlotState.LOAD)
            self._offload.start_load(run, hit.stored)
        if not self._sequences.can_cut and self._pool.has_spare_sequences:
            run.checkpoints = sorted({*run.checkpoints, run.job.system_tokens, len(run.tokens) - 1})

    def _copy(self, source: CachedSequence | Run, run: Run, n_tokens: int) -> None:
        n_copied = self._sequences.copy(source.seq_id, run.seq_id, n_tokens)
        if n_copied:
            self._pool.share(source.seq_id, run.seq_id, n_copied)
            _inherit_scattered(run, source, n_copied)
            run.add_cached(n_copied, CacheTier.RUNNING if isinstance(source, Run) else CacheTier.DEVICE)

    def _adopt(self, run: Run, entry: CachedSequence, n_tokens: int) -> None:
        """Cut the entry's sequence to `n_tokens` and use it as the sequence of the run. The entry is removed."""
        self._cache.remove(entry)
        n_left = self._sequences.cut(run.seq_id, n_tokens) if n_tokens < entry.n_tokens else n_tokens
        self._pool.resize(run.seq_id, n_left)
        _inherit_scattered(run, entry, n_left)
        run.add_cached(n_left, CacheTier.DEVICE)
        self._hits_of_waiting.replace(entry, run, n_left)

    # ---- progress and release of a job

    def record_progress(self, slot: Slot, n_past: int) -> None:
        """Record that the slot's sequence now holds `n_past` tokens. Fewer than before means that cells were lost."""
        run = slot.active
        if n_past < run.n_past:  # a hit may name the run
            self._hits_of_waiting.forget_all()
            self._request_trim()
            run.cached_tokens = min(run.cached_tokens, n_past)
        run.n_past = n_past
        self._pool.resize(run.seq_id, n_past)
        if not self._sequences.can_cut and slot.state is SlotState.PREFILL and run.job.request.cache_prompt:
            self._cache_state(run)

    def remove_after(self, slot: Slot, n_tokens: int) -> None:
        """Remove the cells of the slot's sequence after the first `n_tokens`: those of draft tokens.

        If the sequence cannot be cut there, it loses all cells.
        """
        run = slot.active
        if n_tokens < run.n_past:
            run.n_past = n_tokens  # otherwise `record_progress` would take the removed cells for lost cells
            self.record_progress(slot, self._sequences.cut(run.seq_id, n_tokens))

    def clear(self) -> None:
        """Remove all entries and all cells of the running jobs, and overwrite the data of the cells.

        The running jobs compute their tokens again. Stored blocks are discarded if a run without a token has loaded
        them: their data may be what had to be cleared.
        """
        while self.drop_coldest():
            pass
        for slot in self._pool.active_slots:
            self._offload.cancel_transfers(slot.active.seq_id)  # blocks that are loaded cannot be discarded
        for slot in self._pool.active_slots:
            run = slot.active
            if run.tier in STORED_TIERS and run.prefilled_s is None:
                self._offload.discard_branch(run.packed, run.job.scope)
            run.leader = run.tier = None
            if slot.state is not SlotState.PREFILL:
                slot.transition_to(SlotState.PREFILL)
            self.record_progress(slot, 0)
            run.add_prompt_rows(b"")  # drops the rows of the lost cells
        self._sequences.clear()

    def _cache_state(self, run: Run) -> None:
        """Cache a copy of a state that cannot be cut. Called at the end of a chunk.

        A later prompt that begins with the same tokens can then reuse this state. With only as many sequences as slots,
        no state is copied: each sequence is needed for a job. Then only the ends of jobs leave states.
        """
        run.checkpoints = [position for position in run.checkpoints if position > run.n_past]
        if run.is_suspected or not self._pool.has_spare_sequences or not 0 < run.n_past < len(run.tokens):
            return
        if self._pool.n_free_sequences <= self._pool.n_idle:
            self._eviction.evict_coldest()  # frees a sequence, for the next state that is cached
            return
        seq_id = self._pool.acquire_for_cache()
        n_copied = self._sequences.copy(run.seq_id, seq_id, run.n_past)
        self._pool.share(run.seq_id, seq_id, n_copied)
        if n_copied:
            self.entries.insert(seq_id, run.packed_history(n_copied), run.job.scope)
        else:
            self.entries.remove_sequences([seq_id])

    def release(self, slot: Slot, *, reusable: bool) -> None:
        """Remove the job from its slot. A `reusable` sequence becomes an entry, any other sequence is removed."""
        run = self._pool.release(slot)
        self._offload.cancel_transfers(run.seq_id)
        if run.job.request.cache_prompt:
            self._cache.remove_run(run)
            self._count(run)
        entry = None
        if reusable and run.job.request.cache_prompt and run.n_past and not run.is_suspected:
            entry = self.entries.insert(run.seq_id, run.packed_history(run.n_past), run.job.scope)
            if entry is not None and self._sequences.can_save_parts:
                entry.n_adjacent = run.n_adjacent
        else:
            self.entries.remove_sequences([run.seq_id])
            self._request_trim()
        self._hits_of_waiting.replace(run, entry, run.n_past)

    def _count(self, run: Run) -> None:
        if run.cached_tokens:
            self._n_hits += 1
            self._n_hit_tokens += run.cached_tokens
        else:
            self._n_misses += 1

    # ---- eviction of entries

    def drop_coldest(self) -> bool:
        """Remove the least recently used entry at once, without saving it. Returns False when there is no entry."""
        return self._eviction.drop_coldest()

    def make_room_for_entry(self, n_cells: int) -> Room:
        """Return whether one more entry with `n_cells` new cells can be cached. Evicts other entries to make room."""
        return self._eviction.make_room_for_entry(n_cells)

    def save_ahead(self) -> bool:
        """Save a part of the cells that the next job will evict, in less time than a tick. Call it when no job runs.

        Returns:
            False if there is nothing to save now.
        """
        return self._eviction.save_ahead()

    def stop_saving_ahead(self) -> None:
        """Save nothing ahead until the cache changes. A save of a slot needs stored blocks, which this could evict."""
        self._eviction.stop_saving_ahead()

    # ---- transfers between the tiers

    @property
    def has_transfers(self) -> bool:
        """Whether cells are being moved between the tiers."""
        return self._offload.has_transfers

    def move(self, budget_s: float, prefill_token_s: float = 0.0) -> bool:
        """Begin a tick: evict entries that exceed their limits, then move cells between the tiers.

        Args:
            budget_s: The time of the transfers, in seconds.
            prefill_token_s: The time in which a token of a prompt is computed, in seconds. 0: not known.

        Returns:
            Whether cells were loaded for a job.
        """
        self._hits_of_waiting.begin_tick()
        self._eviction.trim()
        if self._offload.has_transfers:  # the step below may change the stored blocks that a hit names
            self._hits_of_waiting.forget_stored()
        free_cells = self._pool.n_cells - self._pool.ledger.used
        step = self._offload.step(budget_s, prefill_token_s, free_cells)
        for run, n_tokens, tier in step.loaded:
            self._pool.resize(run.seq_id, n_tokens)
            run.add_cached(n_tokens, tier)
        for run in step.finished_loads:
            next(slot for slot in self._pool.active_slots if slot.run is run).transition_to(SlotState.PREFILL)
        for entry in step.finished_saves:
            self.entries.remove(entry)
        return bool(step.loaded)

    def close(self, timeout_s: float) -> None:
        """Write the entries to the disk tier, if it exists, within about `timeout_s` seconds. Stops all transfers."""
        self._offload.close(self._cache.entries(), timeout_s)

    def _note_sequence(self, tokens: bytes, scope: Scope) -> None:
        """Record that an entry with these packed tokens was added."""
        self._hits_of_waiting.add_sequence(tokens, scope)
        self._request_trim()

    def _request_trim(self) -> None:
        """Check the limits of the entries in the next tick.

        Called when a sequence was added, was removed or has lost cells. An entry may now be the only holder of cells
        that it shared with the sequence.
        """
        self._eviction.request_trim()

    # ---- views

    def snapshot(self) -> CacheSnapshot:
        """Return the public state of cells and cache."""
        pool = self._pool
        return CacheSnapshot(
            n_cells=pool.n_cells,
            reserved_cells=pool.reserved_cells,
            used_cells=pool.ledger.used,
            shared_cells=pool.ledger.shared,
            entries=len(self._cache),
            host_bytes=self._offload.host_bytes,
            disk_bytes=self._offload.disk_bytes,
            hits=self._n_hits,
            misses=self._n_misses,
            hit_tokens=self._n_hit_tokens,
            evictions=self._eviction.n_evicted,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the records of slots, sequences, cells, entries and blocks disagree."""
        self._pool.check_integrity()
        self._cache.check_integrity()
        self._offload.check_integrity()
        cached = {entry.seq_id: entry.n_tokens for entry in self._cache.entries()}
        if cached.keys() != self._pool.cached:
            raise AssertionError(f"the cache has {sorted(cached)}, the pool has {sorted(self._pool.cached)}")
        for seq_id, n_tokens in cached.items():
            if self._pool.ledger.held(seq_id) != n_tokens:
                raise AssertionError(f"entry {seq_id}: {n_tokens} tokens, {self._pool.ledger.held(seq_id)} cells")

    def __repr__(self) -> str:
        return f"<KvMemory {self._pool.ledger!r} {len(self._cache)} entries>"


def _inherit_scattered(run: Run, source: CachedSequence | Run, n_tokens: int) -> None:
    """Record which of the copied cells are scattered in the source."""
    if n_tokens > source.n_adjacent:
        run.n_adjacent_copied = source.n_adjacent
