"""Moves cells between the device and the blocks in host memory and on disk.

What lies where is `BlockStore`'s to decide. Here it is done: a block at a time, on the engine thread, between ticks and
for no longer than the ticks of other jobs allow. Files are read and written on a thread of their own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from llamaq.common.errors import EngineError
from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.kv_data import Data
from llamaq.worker.core.sequence_ops import StateOps
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block import Block, Chain, DiskOperation, Span
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import OffloadStep
from llamaq.worker.kv_cache.prefix_cache import Entry
from llamaq.worker.offload.host_arena import HostArena

log = logging.getLogger(__name__)

BLOCK_TOKENS = 64
"""Small, so that one block is moved in less than a tick; saving and loading cost little more than by the hundred."""
MIN_TOKENS = 16
"""Shorter entries are not worth a transfer."""


class Files(Protocol):
    """The disk, on a thread of its own."""

    def carry_out(self, orders: Iterable[DiskOperation]) -> None:
        """Write and erase, in this order, sometime."""

    def read(self, block: Block) -> Future[Data | None]:
        """The block's data; None when its file is not good."""

    def failures(self) -> list[Block]:
        """Blocks whose files could not be written since the last call."""

    def close(self, timeout_s: float) -> None:
        """Carry out what was ordered, for about so long."""


class NoFiles:
    """There is no disk."""

    def carry_out(self, orders: Iterable[DiskOperation]) -> None:
        """Nothing is ordered without a disk."""

    def read(self, block: Block) -> Future[Data | None]:
        raise LookupError(f"{block!r} has no file")

    def failures(self) -> list[Block]:
        return []

    def close(self, timeout_s: float) -> None:
        """There is nothing to wait for."""


@dataclass(slots=True)
class Saving:
    """An entry on its way out: the spans that are not stored yet."""

    entry: Entry
    spans: deque[Span]


@dataclass(slots=True)
class Loading:
    """A run whose first tokens are on their way in."""

    run: Run
    chain: Chain
    blocks: deque[Block]
    """Those that are still to be loaded."""
    read: Future[Data | None] | None = None
    """The first one's data, coming from disk."""

    @property
    def is_ready(self) -> bool:
        return self.read is None or self.read.done()


@dataclass(slots=True)
class Pace:
    """How long a step takes, so that the next is not begun when there is no time for it."""

    step_s: float = field(default=0.0)

    def steps(self, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """One turn at least, and more while another will probably fit into the budget."""
        until_s = clock() + budget_s
        started_s = clock()
        while True:
            yield
            now_s = clock()
            self.step_s += 0.25 * (now_s - started_s - self.step_s)
            if now_s + self.step_s > until_s:
                return
            started_s = now_s


class BlockTransfers:
    """Host memory, and disk where `files` are given."""

    def __init__(
        self, tree: BlockStore, mover: StateOps, files: Files | None = None, memory: HostArena | None = None
    ) -> None:
        """Blocks are written into `memory` that is ready, where there is some."""
        self.tree = tree
        self._memory = memory
        self._mover = mover
        self._files = files or NoFiles()
        self._savings: deque[Saving] = deque()
        self._loadings: deque[Loading] = deque()
        self._pace = Pace()
        self._done = OffloadStep()

    @property
    def host_bytes(self) -> int:
        return self.tree.host_bytes

    @property
    def disk_bytes(self) -> int:
        return self.tree.disk_bytes

    @property
    def is_busy(self) -> bool:
        return bool(self._savings or self._loadings)

    def find(self, tokens: bytes, scope: Scope) -> Chain | None:
        return self.tree.match(tokens, scope) or None

    def fetch(self, run: Run, stored: Chain) -> None:
        self.tree.pin(stored)
        blocks = deque(block for block in stored.blocks if block.end > run.n_past)
        self._loadings.append(Loading(run, stored, blocks))
        self._read_next(self._loadings[-1])

    def keep(self, entry: Entry) -> bool:
        if entry.n_tokens < MIN_TOKENS:
            return False
        spans = deque(self.tree.missing(entry.tokens, entry.scope))
        if spans:
            self._savings.append(Saving(entry, spans))
        else:
            self.tree.touch(self.tree.match(entry.tokens, entry.scope))
        return bool(spans)

    def read(self, block: Block) -> Future[Data | None]:
        if block.data is None:
            return self._files.read(block)
        done: Future[Data | None] = Future()
        done.set_result(block.data)
        return done

    def forget(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        self.tree.forget(tokens, scope, n_kept)
        self._files.carry_out(self.tree.take_orders())

    def abandon(self, seq_id: int) -> None:
        self._savings = deque(saving for saving in self._savings if saving.entry.seq_id != seq_id)
        for loading in [each for each in self._loadings if each.run.seq_id == seq_id]:
            self._end_loading(loading)

    def step(self, budget_s: float) -> OffloadStep:
        for block in self._files.failures():
            self.tree.lost(block)
        if self.is_busy:
            for _ in self._pace.steps(budget_s):
                if not self._move_one():
                    break
        self._files.carry_out(self.tree.take_orders())
        done, self._done = self._done, OffloadStep()
        return done

    def close(self, entries: Iterable[Entry], timeout_s: float) -> None:
        """Save the entries too if there is a disk, the warmest first, and write everything to it."""
        until_s = time.monotonic() + timeout_s
        for entry in reversed(list(entries)):
            saving = Saving(entry, deque(self.tree.missing(entry.tokens, entry.scope)))
            while saving.spans and time.monotonic() < until_s:
                self._save_one(saving)
        self.tree.spill()
        self._files.carry_out(self.tree.take_orders())
        self._files.close(max(0.0, until_s - time.monotonic()))
        if self._memory:
            self._memory.close()

    def check_integrity(self) -> None:
        self.tree.check_integrity()

    def _move_one(self) -> bool:
        """Move one block, into the device first: somebody waits for it. False when nothing can be moved now."""
        for loading in self._loadings:
            if loading.is_ready:
                self._load_one(loading)
                return True
        if self._savings:
            saving = self._savings[0]
            self._save_one(saving)
            if not saving.spans:
                self._savings.popleft()
                self._done.kept.append(saving.entry)
            return True
        return False

    # ---- out

    def _save_one(self, saving: Saving) -> None:
        entry, span = saving.entry, saving.spans.popleft()
        try:
            data = self._mover.save(entry.seq_id, span.start, span.end, lambda n_bytes: self._ready(n_bytes, span))
        except EngineError as exc:
            log.warning("cache.not_saved entry=%r error=%s", entry, exc)
            saving.spans.clear()
            return
        if self.tree.put(entry.tokens, entry.scope, span, data) is None:
            saving.spans.clear()  # no room for what comes after it either

    def _ready(self, n_bytes: int, span: Span) -> memoryview | None:
        return self._memory.take(n_bytes, span.end - span.start) if self._memory else None

    # ---- in

    def _load_one(self, loading: Loading) -> None:
        run, block = loading.run, loading.blocks.popleft()
        data, tier = block.data, CacheTier.HOST
        if loading.read is not None:
            data, tier, loading.read = loading.read.result(), CacheTier.DISK, None
            if data is not None:
                self.tree.loaded(block, data)
        end = min(block.end, loading.chain.n_tokens)
        if data is None or not self._mover.load(run.seq_id, self._held(run), end, data, block.start):
            log.warning("cache.not_loaded job=%s block=%r", run.job.id, block)
            self._end_loading(loading)
            if data is None:
                self.tree.lost(block)
        else:
            self._done.loaded.append((run, end, tier))
            if loading.blocks:
                self._read_next(loading)
                return
            self._end_loading(loading)
        self._done.fetched.append(run)

    def _held(self, run: Run) -> int:
        """Tokens that the run's sequence holds, those of this step included."""
        return next((end for other, end, _ in reversed(self._done.loaded) if other is run), run.n_past)

    def _read_next(self, loading: Loading) -> None:
        block = loading.blocks[0]
        if block.data is None:
            loading.read = self._files.read(block)

    def _end_loading(self, loading: Loading) -> None:
        self._loadings.remove(loading)
        self.tree.unpin(loading.chain)

    def __repr__(self) -> str:
        return f"<BlockTransfers {self.tree!r} {len(self._savings)} going out, {len(self._loadings)} coming in>"
