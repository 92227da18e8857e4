"""KV memory as the scheduler sees it: jobs enter and leave it, and what they computed serves those who come later."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.common.protocol.queue_state import CacheSnapshot
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.sequence_ops import SequenceOps
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.kv_cache.eviction import Eviction, Room
from llamaq.worker.kv_cache.offload_interface import NoOffload, Offload
from llamaq.worker.kv_cache.prefix_cache import Entry, PrefixCache
from llamaq.worker.kv_cache.prefix_lookup import PrefixHit, PrefixLookup
from llamaq.worker.kv_cache.slot_pool import SlotPool


class KvMemory:
    """Brings together who decides about KV memory (pool, prefix cache, tiers) and what does it (the sequences)."""

    def __init__(
        self,
        pool: SlotPool,
        sequences: SequenceOps,
        cache: PrefixCache,
        tiers: Offload | None = None,
        *,
        held_cells: int | None = None,
    ) -> None:
        """`held_cells`: as many cells may entries alone hold while jobs run, who walk them all; None: all there are."""
        self.pool = pool
        self.cache = cache
        self._sequences = sequences
        self._tiers = NoOffload() if tiers is None else tiers
        self._ways = PrefixLookup(cache, self._tiers, in_blocks=sequences.in_blocks)
        self.eviction = Eviction(pool, cache, self._tiers, self._drop, held_cells=held_cells)
        self._hits = self._misses = self._hit_tokens = 0

    # ---- a job comes

    def gain(self, job: Job) -> int:
        """How many tokens of the job need not be computed if it enters now."""
        return self._ways.find(job).n_tokens

    def make_room(self, job: Job) -> Room:
        """Whether the job can enter; entries give way to it where that helps."""
        if not self.pool.has_slot(job):
            return Room.NONE
        return self.eviction.make_room(job, self._ways.find(job))

    def enter(self, job: Job, now_s: float) -> Slot:
        """Give the job a slot, a sequence, and what is there of its prompt; call when `make_room` says NOW."""
        way = self._ways.find(job)
        adopted = self.eviction.adoptable(way)
        slot = self.pool.acquire(job, now_s, adopted.seq_id if adopted else None)
        if adopted:
            self._go_on_in(slot.active, adopted, way.n_held)
            way = PrefixHit(stored=way.stored)
        self._follow(slot, way)
        if job.request.cache_prompt:
            self.cache.begin(slot.active)
        self.eviction.is_trimmed = False
        return slot

    def settle(self) -> None:
        """Let those go on who waited for another's prefill, where it has passed what they share or has ended."""
        waiting = [slot for slot in self.pool.active if slot.state is SlotState.FOLLOW]
        for slot in sorted(waiting, key=lambda slot: slot.active.admission_number):
            run = slot.active
            if run.leader is None or run.leader.is_released or run.leader.n_past >= run.awaited_tokens:
                run.leader = None
                slot.transition_to(SlotState.PREFILL)
                self._follow(slot, self._ways.find(run.job, run.admission_number))

    def _follow(self, slot: Slot, way: PrefixHit) -> None:
        run = slot.active
        if way.leader:
            run.leader, run.awaited_tokens = way.leader, way.n_coming
            slot.transition_to(SlotState.FOLLOW)
            if not self._sequences.can_cut and way.n_coming not in way.leader.checkpoints:
                insort(way.leader.checkpoints, way.n_coming)
            return
        if way.source:
            self._copy(way.source, run, way.n_held)
        if way.stored:
            slot.transition_to(SlotState.LOAD)
            self._tiers.start_load(run, way.stored)
        elif not self._sequences.can_cut:
            run.checkpoints = sorted({*run.checkpoints, run.job.system_tokens, len(run.tokens) - 1})

    def _copy(self, source: Entry | Run, run: Run, n_tokens: int) -> None:
        copied = self._sequences.copy(source.seq_id, run.seq_id, n_tokens)
        if copied:
            self.pool.share(source.seq_id, run.seq_id, copied)
            run.add_cached(copied, CacheTier.RUNNING if isinstance(source, Run) else CacheTier.DEVICE)

    def _go_on_in(self, run: Run, entry: Entry, n_tokens: int) -> None:
        self.cache.remove(entry)
        n_kept = self._sequences.cut(run.seq_id, n_tokens) if n_tokens < entry.n_tokens else n_tokens
        self.pool.hold(run.seq_id, n_kept)
        run.add_cached(n_kept, CacheTier.DEVICE)

    # ---- what is asked for explicitly, see `SlotStates`

    def keep(self, seq_id: int, tokens: bytes, scope: Scope) -> None:
        """A kept sequence holds exactly these tokens: offer it to the prefix cache."""
        self._remove(self.cache.insert(seq_id, tokens, scope))
        self.eviction.is_trimmed = False

    def forget(self, entry: Entry) -> None:
        """Remove an entry's sequence, and save nothing of it."""
        self._drop(entry)

    # ---- a job goes on, and leaves

    def progress(self, slot: Slot, n_past: int) -> None:
        """The slot's sequence holds so many tokens now."""
        run = slot.active
        run.n_past = n_past
        run.cached_tokens = min(run.cached_tokens, n_past)
        self.pool.hold(run.seq_id, n_past)
        if not self._sequences.can_cut and slot.state is SlotState.PREFILL and run.job.request.cache_prompt:
            self._keep_state(run)

    def _keep_state(self, run: Run) -> None:
        """Keep a copy of a state that cannot be cut back to, at a border of chunks: others may begin like this."""
        run.checkpoints = [stop for stop in run.checkpoints if stop > run.n_past]
        if not 0 < run.n_past < len(run.tokens):
            return
        if self.pool.n_free <= self.pool.n_idle:
            self.eviction.let_coldest_go()  # for the next state
            return
        seq_id = self.pool.keep_another()
        copied = self._sequences.copy(run.seq_id, seq_id, run.n_past)
        self.pool.share(run.seq_id, seq_id, copied)
        if copied:
            self._remove(self.cache.insert(seq_id, run.packed_history(copied), run.job.scope))
        else:
            self._remove([seq_id])

    def leave(self, slot: Slot, *, reusable: bool) -> None:
        """Take the job out of its slot. A `reusable` sequence is offered to the prefix cache, others are removed."""
        run = self.pool.release(slot)
        self._tiers.cancel_transfers(run.seq_id)
        if run.job.request.cache_prompt:
            self.cache.end(run)
            self._count(run)
        if reusable and run.job.request.cache_prompt and run.n_past:
            self._remove(self.cache.insert(run.seq_id, run.packed_history(run.n_past), run.job.scope))
            self.eviction.is_trimmed = False
        else:
            self._remove([run.seq_id])

    def _count(self, run: Run) -> None:
        if run.cached_tokens:
            self._hits += 1
            self._hit_tokens += run.cached_tokens
        else:
            self._misses += 1

    # ---- between the tiers

    @property
    def is_moving(self) -> bool:
        """Whether something is on its way between the tiers."""
        return self._tiers.has_transfers

    def move(self, budget_s: float) -> bool:
        """Go on moving between the tiers, for about so long. True when cells came for somebody."""
        self.eviction.trim()
        done = self._tiers.step(budget_s)
        for run, n_tokens, tier in done.loaded:
            self.pool.hold(run.seq_id, n_tokens)
            run.add_cached(n_tokens, tier)
        for run in done.finished_loads:
            next(slot for slot in self.pool.active if slot.run is run).transition_to(SlotState.PREFILL)
        for entry in done.finished_saves:
            self._drop(entry)
        return bool(done.loaded)

    def close(self, timeout_s: float) -> None:
        """Save what a later worker may use, for about so long, and stop moving."""
        self._tiers.close(self.cache.entries(), timeout_s)

    def _drop(self, entry: Entry) -> None:
        self.cache.remove(entry)
        self._remove([entry.seq_id])

    def _remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._tiers.cancel_transfers(seq_id)
            self._sequences.remove(seq_id)
            self.pool.reclaim(seq_id)

    # ---- what others see

    def snapshot(self) -> CacheSnapshot:
        pool = self.pool
        return CacheSnapshot(
            n_cells=pool.n_cells,
            reserved_cells=sum(slot.active.job.reservation for slot in pool.active),
            used_cells=pool.ledger.used,
            shared_cells=pool.ledger.shared,
            entries=len(self.cache),
            host_bytes=self._tiers.host_bytes,
            disk_bytes=self._tiers.disk_bytes,
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            evictions=self.eviction.n_evicted,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` when slots, sequences, cells, cache and tiers contradict each other."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        self._tiers.check_integrity()
        kept = {entry.seq_id: entry.n_tokens for entry in self.cache.entries()}
        if kept.keys() != self.pool.kept:
            raise AssertionError(f"the cache has {sorted(kept)}, the pool keeps {sorted(self.pool.kept)}")
        for seq_id, n_tokens in kept.items():
            if self.pool.ledger.held(seq_id) != n_tokens:
                raise AssertionError(f"entry {seq_id}: {n_tokens} tokens, {self.pool.ledger.held(seq_id)} cells")

    def __repr__(self) -> str:
        return f"<KvMemory {self.pool.ledger!r} {len(self.cache)} entries>"
