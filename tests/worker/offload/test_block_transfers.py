"""Transfers between the device and the offload tiers, on fake cells that record their tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future

import pytest

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block import Block, DiskOperation, WriteBlock
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.offload.block_files_interface import NoBlockFiles
from llamaq.worker.offload.block_transfers import MIN_ENTRY_TOKENS, BlockTransfers, TransferPacer
from llamaq.worker.offload.host_arena import HostArena
from llamaq.worker.testing import FakeEngine, make_job

ROOMY = 10**9
BLOCK_TOKENS = 8
TOKENS = list(range(20))
SCOPE = Scope()
EMPTY_SEQUENCE = 5
OTHER_SEQUENCE = 6


class FakeDisk:
    """A disk tier in memory. `finish_reads` finishes the pending reads. For a real disk, a thread does this."""

    is_behind = False

    def __init__(self) -> None:
        self.files: dict[bytes, SavedCells] = {}
        self.invalid: set[Block] = set()
        self.failed: list[Block] = []
        self.is_closing = False
        self.is_closed = False
        self._reads: list[tuple[Block, Future[SavedCells | None]]] = []

    def submit(self, operations: Iterable[DiskOperation], *, is_closing: bool = False) -> None:
        self.is_closing = is_closing
        for operation in operations:
            if isinstance(operation, WriteBlock):
                self.files[operation.block.name] = operation.data
            else:
                del self.files[operation.block.name]

    def read(self, block: Block) -> Future[SavedCells | None]:
        self._reads.append((block, Future()))
        return self._reads[-1][1]

    def finish_reads(self) -> None:
        for block, read in self._reads:
            read.set_result(None if block in self.invalid else self.files[block.name])
        self._reads.clear()

    def drain_failed_blocks(self) -> list[Block]:
        failed, self.failed = self.failed, []
        return failed

    def close(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        self.is_closed = True


class Setup:
    """Transfers with blocks of 8 tokens. Sequence 0 is an entry of 20 tokens, so its blocks end at 8, 16 and 20."""

    def __init__(self, *, host_bytes: int = ROOMY, arena: HostArena | None = None) -> None:
        self.sequences = FakeEngine(n_ctx=1000, n_batch=100, n_seq_max=9).sequences
        self.sequences.append(0, TOKENS)
        self.disk = FakeDisk()
        self.store = BlockStore(BLOCK_TOKENS, host_bytes, ROOMY, can_cut=True)
        self.transfers = BlockTransfers(self.store, self.sequences, self.disk, arena)
        self.entry = CachedSequence(0, pack(TOKENS), SCOPE)

    def save(self) -> None:
        """Save the whole entry."""
        assert self.transfers.start_save(self.entry)
        finished: list[CachedSequence] = []
        while self.transfers.has_transfers:
            finished += self.transfers.step(0).finished_saves
            self.transfers.check_integrity()
        assert finished == [self.entry]

    def save_other(self, tokens: list[int]) -> None:
        """Save another entry as a whole."""
        self.sequences.remove(OTHER_SEQUENCE)
        self.sequences.append(OTHER_SEQUENCE, tokens)
        assert self.transfers.start_save(CachedSequence(OTHER_SEQUENCE, pack(tokens), SCOPE))
        while self.transfers.has_transfers:
            self.transfers.step(0)

    def is_in_host(self, tokens: list[int]) -> bool:
        return all(block.data is not None for block in self.store.match(pack(tokens), SCOPE).blocks)

    def n_stored(self) -> int:
        stored = self.transfers.match(pack(TOKENS), SCOPE)
        return stored.n_tokens if stored else 0

    def start_load(self, n_past: int = 0) -> Run:
        """Copy `n_past` cells into an empty sequence, then start to load the rest of the stored prefix into it."""
        run = Run(make_job(TOKENS), EMPTY_SEQUENCE, TOKENS)
        if n_past:
            run.n_past = self.sequences.copy(0, EMPTY_SEQUENCE, n_past)
        stored = self.transfers.match(pack(TOKENS), SCOPE)
        assert stored is not None
        self.transfers.start_load(run, stored)
        return run


def test_a_step_saves_one_block_and_the_last_step_reports_the_entry() -> None:
    setup = Setup()
    assert setup.transfers.start_save(setup.entry)
    lengths = []
    while setup.transfers.has_transfers:
        setup.transfers.step(0)
        lengths.append(setup.n_stored())
    assert lengths == [8, 16, 20]
    assert setup.transfers.host_bytes > 0
    assert not setup.transfers.start_save(setup.entry), "all blocks of the entry are stored"


def test_the_blocks_of_an_entry_that_are_stored_already_are_evicted_last() -> None:
    setup = Setup()
    setup.save()
    n_bytes = setup.transfers.host_bytes
    setup = Setup(host_bytes=2 * n_bytes)
    setup.save()
    others = [[*range(start, start + 20)] for start in (100, 200)]
    setup.save_other(others[0])
    assert not setup.transfers.start_save(setup.entry)
    setup.save_other(others[1])
    in_host = [setup.is_in_host(tokens) for tokens in (TOKENS, *others)]
    assert in_host == [True, False, True]


def test_transfers_continue_while_the_next_one_probably_ends_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    pacer = TransferPacer()
    counts = []
    for _ in range(20):
        counts.append(0)
        for _ in pacer.rounds(4.5):
            counts[-1] += 1
            now_s += 1
    assert counts[0] == 4
    assert pacer.transfer_s == pytest.approx(1, rel=0.01)


def test_an_entry_that_is_too_short_is_not_saved() -> None:
    setup = Setup()
    assert not setup.transfers.start_save(CachedSequence(0, pack(TOKENS[: MIN_ENTRY_TOKENS - 1]), SCOPE))
    assert not setup.transfers.has_transfers


def test_save_ahead_saves_one_block_and_a_later_save_has_less_to_save() -> None:
    setup = Setup()
    assert setup.transfers.save_ahead(setup.entry)
    assert (setup.n_stored(), setup.transfers.has_transfers) == (8, False)
    assert setup.transfers.start_save(setup.entry)
    lengths = []
    while setup.transfers.has_transfers:
        setup.transfers.step(0)
        lengths.append(setup.n_stored())
    assert lengths == [16, 20]
    assert not setup.transfers.save_ahead(setup.entry), "all blocks of the entry are stored"


def test_save_ahead_tells_when_no_block_can_be_saved() -> None:
    setup = Setup()
    assert not setup.transfers.save_ahead(CachedSequence(0, pack(TOKENS[: MIN_ENTRY_TOKENS - 1]), SCOPE)), "too short"
    setup.sequences.fail_saves()
    assert not setup.transfers.save_ahead(setup.entry)
    full = BlockTransfers(BlockStore(BLOCK_TOKENS, 10, can_cut=True), setup.sequences)
    assert not full.save_ahead(setup.entry)


def test_blocks_that_are_saved_ahead_may_move_others_to_disk() -> None:
    setup = Setup(host_bytes=200)
    while setup.transfers.save_ahead(setup.entry):
        setup.transfers.check_integrity()
    assert setup.n_stored() == 20
    assert len(setup.disk.files) > 0


def test_a_failed_save_ends_the_save_of_the_entry() -> None:
    setup = Setup()
    setup.transfers.start_save(setup.entry)
    setup.transfers.step(0)
    setup.sequences.fail_saves()
    assert setup.transfers.step(0).finished_saves == [setup.entry]
    assert setup.n_stored() == 8
    assert not setup.transfers.has_transfers


def test_a_save_ends_when_a_block_finds_no_room() -> None:
    setup = Setup()
    setup.transfers = BlockTransfers(BlockStore(BLOCK_TOKENS, 10, can_cut=True), setup.sequences)
    setup.transfers.start_save(setup.entry)
    assert setup.transfers.step(0).finished_saves == [setup.entry]
    assert setup.n_stored() == 0


def test_a_load_from_host_memory_appends_one_block_after_the_other() -> None:
    setup = Setup()
    setup.save()
    run = setup.start_load(n_past=3)
    steps = []
    while setup.transfers.has_transfers:
        step = setup.transfers.step(0)
        steps += [(loaded.n_tokens, loaded.tier) for loaded in step.loaded]
        run.n_past = step.loaded[-1].n_tokens
    assert steps == [(8, CacheTier.HOST), (16, CacheTier.HOST), (20, CacheTier.HOST)]
    assert step.finished_loads == [run]
    assert setup.sequences.tokens(EMPTY_SEQUENCE) == TOKENS


def test_one_step_may_load_several_blocks_of_one_run() -> None:
    setup = Setup()
    setup.save()
    run = setup.start_load()
    step = setup.transfers.step(60)
    assert [loaded.n_tokens for loaded in step.loaded] == [8, 16, 20]
    assert step.finished_loads == [run]


def test_a_load_from_disk_waits_for_its_reads_and_saves_continue_meanwhile() -> None:
    setup = Setup(host_bytes=0)
    setup.save()
    run = setup.start_load()
    setup.sequences.append(1, range(100, 120))
    other = CachedSequence(1, pack(range(100, 120)), SCOPE)
    setup.transfers.start_save(other)
    finished = [entry for _ in range(3) for entry in setup.transfers.step(0).finished_saves]
    assert finished == [other]
    assert setup.transfers.step(60).loaded == []
    tiers = []
    while setup.transfers.has_transfers:
        setup.disk.finish_reads()
        tiers += [loaded.tier for loaded in setup.transfers.step(0).loaded]
        run.n_past = setup.sequences.n_held(EMPTY_SEQUENCE)
    assert tiers == [CacheTier.DISK] * 3
    assert setup.sequences.tokens(EMPTY_SEQUENCE) == TOKENS


def test_a_load_ends_at_a_block_with_an_invalid_file() -> None:
    setup = Setup(host_bytes=0)
    setup.save()
    run = setup.start_load()
    stored = setup.transfers.match(pack(TOKENS), SCOPE)
    assert stored is not None
    setup.disk.invalid.add(stored.blocks[1])
    setup.disk.finish_reads()
    run.n_past = setup.transfers.step(0).loaded[-1].n_tokens
    setup.disk.finish_reads()
    assert setup.transfers.step(0).finished_loads == [run]
    assert setup.n_stored() == 8
    setup.transfers.check_integrity()


def test_a_load_that_the_engine_refuses_ends_and_the_block_stays_stored() -> None:
    setup = Setup()
    setup.save()
    run = setup.start_load()
    setup.sequences.fail_loads()
    step = setup.transfers.step(0)
    assert (step.loaded, step.finished_loads) == ([], [run])
    assert setup.n_stored() == 20


@pytest.mark.parametrize(("free_cells", "n_loaded"), [(7, 0), (8, 8), (15, 8), (16, 16), (19, 16), (20, 20)])
def test_a_load_ends_before_a_block_for_which_too_few_cells_are_free(
    free_cells: int, n_loaded: int, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup()
    setup.save()
    run = setup.start_load()
    step = setup.transfers.step(60, free_cells=free_cells)
    assert setup.sequences.n_held(EMPTY_SEQUENCE) == n_loaded
    assert ([loaded.n_tokens for loaded in step.loaded][-1:] or [0]) == [n_loaded]
    assert step.finished_loads == [run]
    assert setup.n_stored() == 20
    assert not caplog.records
    setup.transfers.check_integrity()


def test_a_block_of_which_the_device_holds_a_part_needs_cells_for_all_its_tokens() -> None:
    setup = Setup()
    setup.save()
    run = setup.start_load(n_past=6)
    step = setup.transfers.step(60, free_cells=7)
    assert (step.loaded, step.finished_loads) == ([], [run])


def test_cancel_transfers_ends_the_saves_and_loads_of_one_sequence() -> None:
    setup = Setup()
    setup.save()
    setup.sequences.append(1, range(100, 120))
    setup.transfers.start_save(CachedSequence(1, pack(range(100, 120)), SCOPE))
    setup.start_load()
    assert "1 saves, 1 loads" in repr(setup.transfers)
    setup.transfers.cancel_transfers(EMPTY_SEQUENCE)
    setup.transfers.cancel_transfers(2)
    assert "1 saves, 0 loads" in repr(setup.transfers)
    setup.transfers.cancel_transfers(1)
    assert not setup.transfers.has_transfers
    setup.transfers.check_integrity()


def test_a_block_whose_write_failed_is_removed_at_the_next_step() -> None:
    setup = Setup(host_bytes=0)
    setup.save()
    stored = setup.transfers.match(pack(TOKENS), SCOPE)
    assert stored is not None
    setup.disk.failed.append(stored.blocks[1])
    setup.transfers.step(0)
    assert setup.n_stored() == 8


def test_close_writes_the_entries_and_host_memory_to_disk() -> None:
    setup = Setup(arena=HostArena(10**6, BLOCK_TOKENS))
    setup.save()
    setup.sequences.append(1, range(100, 120))
    entries = [CachedSequence(1, pack(range(100, 120)), SCOPE), setup.entry]
    assert not setup.disk.files
    setup.transfers.close(entries, 60)
    assert len(setup.disk.files) == 6
    assert setup.disk.is_closing
    assert setup.disk.is_closed


def test_close_saves_no_entry_after_its_timeout() -> None:
    setup = Setup()
    setup.transfers.close([setup.entry], 0)
    assert not setup.disk.files
    assert setup.disk.is_closed


def test_discard_erases_the_files_of_removed_blocks() -> None:
    setup = Setup(host_bytes=0)
    setup.save()
    setup.transfers.discard(pack(TOKENS), SCOPE, 8)
    assert len(setup.disk.files) == 1
    assert setup.n_stored() == 8


def test_without_a_disk_no_block_can_be_read() -> None:
    setup = Setup()
    setup.save()
    stored = setup.transfers.match(pack(TOKENS), SCOPE)
    assert stored is not None
    assert setup.transfers.read_block(stored.blocks[0]).result(0) == stored.blocks[0].data
    with pytest.raises(LookupError, match="has no file"):
        NoBlockFiles().read(stored.blocks[0])
