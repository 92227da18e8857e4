"""Moves KV cells between the device and the blocks in host memory and on disk.

`BlockStore` decides which block is stored in which tier. This module moves the data between ticks, on the engine
thread, one block at a time, and only for the time that the running jobs allow. Another thread reads and writes files.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from llamaq.common.errors import EngineError
from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.core.sequence_interface import StateOps
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block import Block, BlockSpan, StoredPrefix
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import LoadedTokens, OffloadStep
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.offload.block_files_interface import BlockFiles, NoBlockFiles
from llamaq.worker.offload.host_arena import HostArena
from llamaq.worker.offload.save_costs import NoSaveCosts, SaveCosts

log = logging.getLogger(__name__)

BLOCK_TOKENS = 64
"""Number of tokens of a block. A block of this size moves in less than a tick. Larger blocks are hardly faster per
token."""
MIN_ENTRY_TOKENS = 16
"""Entries with fewer tokens are not saved, because their transfer takes more time than it saves."""


@dataclass(slots=True)
class SaveTransfer:
    """A transfer that saves the cells of an entry from the device."""

    entry: CachedSequence
    spans: deque[BlockSpan]
    """The spans that are not saved yet."""


@dataclass(slots=True)
class LoadTransfer:
    """A transfer that loads a stored prefix into the sequence of a run."""

    run: Run
    stored: StoredPrefix
    blocks: deque[Block]
    """The blocks that are not loaded yet."""
    disk_read: Future[SavedCells | None] | None = None
    """The disk read of the next block. None if the data of the next block is in host memory."""

    @property
    def is_ready(self) -> bool:
        """Whether the next block can be loaded without waiting for the disk."""
        return self.disk_read is None or self.disk_read.done()


@dataclass(slots=True)
class TransferPacer:
    """Limits a loop of transfers to a time budget, based on the measured time of one transfer."""

    transfer_s: float = field(default=0.0)
    """Moving average of the time of one transfer, in seconds."""

    def rounds(self, budget_s: float) -> Iterator[None]:
        """Yield once, and then as long as the next transfer will probably end within `budget_s`."""
        started_s = time.perf_counter()
        deadline_s = started_s + budget_s
        while True:
            yield
            now_s = time.perf_counter()
            self.transfer_s += 0.25 * (now_s - started_s - self.transfer_s)
            if now_s + self.transfer_s > deadline_s:
                return
            started_s = now_s


class BlockTransfers:
    """Saves entries into a `BlockStore` and loads stored prefixes from this store. Implements `Offload`."""

    def __init__(
        self,
        store: BlockStore,
        sequences: StateOps,
        files: BlockFiles | None = None,
        arena: HostArena | None = None,
        costs: SaveCosts | None = None,
    ) -> None:
        """Connect the parts.

        Args:
            store: Decides which blocks are stored, and in which tier.
            sequences: Saves and loads the cells of the engine's sequences.
            files: The disk tier. None: there is no disk.
            arena: Provides memory for saved cells. None: every save allocates its memory.
            costs: Decides which blocks are worth saving. None: all of them are.
        """
        self.store = store
        self._sequences = sequences
        self._files = files or NoBlockFiles()
        self._arena = arena
        self._costs = costs or NoSaveCosts()
        self._saves: deque[SaveTransfer] = deque()
        self._loads: deque[LoadTransfer] = deque()
        self._pacer = TransferPacer()
        self._free_cells = inf
        """Number of cells that no sequence holds, in this step."""
        self._results = OffloadStep()

    @property
    def host_bytes(self) -> int:
        return self.store.host_bytes

    @property
    def disk_bytes(self) -> int:
        return self.store.disk_bytes

    @property
    def has_transfers(self) -> bool:
        return bool(self._saves or self._loads)

    def match(self, tokens: bytes, scope: Scope) -> StoredPrefix | None:
        return self.store.match(tokens, scope) or None

    def start_load(self, run: Run, stored: StoredPrefix) -> None:
        self.store.pin(stored)
        blocks = deque(block for block in stored.blocks if block.end > run.n_past)
        self._loads.append(LoadTransfer(run, stored, blocks))
        self._start_disk_read(self._loads[-1])

    def start_save(self, entry: CachedSequence) -> bool:
        spans = self._missing_spans(entry)
        if spans:
            self._saves.append(SaveTransfer(entry, spans))
        else:
            self.store.touch(self.store.match(entry.tokens, entry.scope))
        return bool(spans)

    @property
    def can_save_ahead(self) -> bool:
        return not self._files.is_behind

    def save_ahead(self, entry: CachedSequence) -> bool:
        spans = self._missing_spans(entry, is_idle=True)
        is_saved = bool(spans) and self._save_span(entry, spans[0])
        self._submit_disk_operations()
        return is_saved

    def read_block(self, block: Block) -> Future[SavedCells | None]:
        if block.data is None:
            return self._files.read(block)
        done: Future[SavedCells | None] = Future()
        done.set_result(block.data)
        return done

    def discard(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        self.store.discard(tokens, scope, n_kept)
        self._submit_disk_operations()

    def discard_branch(self, tokens: bytes, scope: Scope) -> None:
        self.store.discard_branch(tokens, scope)
        self._submit_disk_operations()

    def cancel_transfers(self, seq_id: int) -> None:
        self._saves = deque(save for save in self._saves if save.entry.seq_id != seq_id)
        for load in [each for each in self._loads if each.run.seq_id == seq_id]:
            self._end_load(load)

    def step(self, budget_s: float, prefill_token_s: float = 0.0, free_cells: float = inf) -> OffloadStep:
        self._free_cells = free_cells
        self._costs.prefill_token_s = prefill_token_s
        for block in self._files.drain_failed_blocks():
            self.store.mark_file_lost(block)
        if self.has_transfers:
            for _ in self._pacer.rounds(budget_s):
                if not self._transfer_one_block():
                    break
        self._submit_disk_operations()
        results, self._results = self._results, OffloadStep()
        return results

    def close(self, entries: Iterable[CachedSequence], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for entry in reversed(list(entries)):
            save = SaveTransfer(entry, deque(self.store.missing_spans(entry.tokens, entry.scope)))
            while save.spans and time.monotonic() < deadline_s:
                self._save_one_block(save)
        self.store.write_host_to_disk()
        self._files.submit(self.store.drain_disk_operations(), is_closing=True)
        self._files.close(max(0.0, deadline_s - time.monotonic()))
        if self._arena:
            self._arena.close()

    def check_integrity(self) -> None:
        self.store.check_integrity()

    def _submit_disk_operations(self) -> None:
        self._files.submit(self.store.drain_disk_operations())

    def _transfer_one_block(self) -> bool:
        """Load or save one block. False when no transfer is ready. Loads come first, because jobs wait for loads."""
        for load in self._loads:
            if load.is_ready:
                self._load_one_block(load)
                return True
        if self._saves:
            save = self._saves[0]
            self._save_one_block(save)
            if not save.spans:
                self._saves.popleft()
                self._results.finished_saves.append(save.entry)
            return True
        return False

    # ---- from the device

    def _missing_spans(self, entry: CachedSequence, *, is_idle: bool = False) -> deque[BlockSpan]:
        """Return the spans of the entry that are worth saving and are not stored."""
        if entry.n_tokens < MIN_ENTRY_TOKENS:
            return deque()

        def is_worth_saving(span: BlockSpan) -> bool:
            return self._costs.is_worth_saving(span.end - span.start, _n_scattered(entry, span), is_idle=is_idle)

        return deque(takewhile(is_worth_saving, self.store.missing_spans(entry.tokens, entry.scope)))

    def _save_one_block(self, save: SaveTransfer) -> None:
        if not self._save_span(save.entry, save.spans.popleft()):
            save.spans.clear()  # a block needs its parent, so the later spans cannot be stored either

    def _save_span(self, entry: CachedSequence, span: BlockSpan) -> bool:
        """Save these cells of the entry. Returns False if llama.cpp or the store refuses them."""
        if self._costs.are_measured:
            self._sequences.wait()  # only the copies are measured
        started_s = time.perf_counter()
        try:
            data = self._sequences.save(
                entry.seq_id, span.start, span.end, lambda n_bytes: self._allocate(n_bytes, span)
            )
        except EngineError as exc:
            log.warning("cache.save_failed entry=%r error=%s", entry, exc)
            return False
        self._costs.record(span.end - span.start, _n_scattered(entry, span), time.perf_counter() - started_s)
        return self.store.insert(entry.tokens, entry.scope, span, data) is not None

    def _allocate(self, n_bytes: int, span: BlockSpan) -> memoryview | None:
        return self._arena.allocate(n_bytes, span.end - span.start) if self._arena else None

    # ---- to the device

    def _load_one_block(self, load: LoadTransfer) -> None:
        run, block = load.run, load.blocks.popleft()
        data, tier = block.data, CacheTier.HOST
        if load.disk_read is not None:
            data, tier, load.disk_read = load.disk_read.result(), CacheTier.DISK, None
            if data is not None:
                self.store.store_in_host(block, data)
        start, end = self._n_loaded(run), min(block.end, load.stored.n_tokens)
        if data is not None and block.end - block.start > self._free_cells:
            log.info("cache.no_room_to_load job=%s block=%r free_cells=%d", run.job.id, block, self._free_cells)
            self._end_load(load)
        elif data is None or not self._sequences.load(run.seq_id, start, end, data, block.start):
            log.warning("cache.load_failed job=%s block=%r", run.job.id, block)
            self._end_load(load)
            if data is None:
                self.store.mark_file_lost(block)
        else:
            self._free_cells -= end - start
            self._results.loaded.append(LoadedTokens(run, end, tier))
            if load.blocks:
                self._start_disk_read(load)
                return
            self._end_load(load)
        self._results.finished_loads.append(run)

    def _n_loaded(self, run: Run) -> int:
        """Return how many tokens are in the sequence of the run, including those loaded in this step."""
        return next((each.n_tokens for each in reversed(self._results.loaded) if each.run is run), run.n_past)

    def _start_disk_read(self, load: LoadTransfer) -> None:
        """Start reading the next block of the load, if its data is only on disk."""
        block = load.blocks[0]
        if block.data is None:
            load.disk_read = self._files.read(block)

    def _end_load(self, load: LoadTransfer) -> None:
        self._loads.remove(load)
        self.store.unpin(load.stored)

    def __repr__(self) -> str:
        return f"<BlockTransfers {self.store!r} {len(self._saves)} saves, {len(self._loads)} loads>"


def _n_scattered(entry: CachedSequence, span: BlockSpan) -> int:
    """Return how many cells of the span are scattered."""
    return max(0, span.end - max(span.start, entry.n_adjacent))
