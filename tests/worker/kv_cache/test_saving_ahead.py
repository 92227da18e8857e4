"""An idle worker saves the cells that the next job will evict."""

from __future__ import annotations

import struct
from pathlib import Path
from threading import Event

from tests.support.prefix_cache_rig import run_all, run_an_unrelated_job, scheduler_with

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, make_scheduler, run_to_end


def save_all_ahead(scheduler: Scheduler) -> int:
    """Save all cells that the next job will evict. Returns the number of blocks."""
    n_blocks = 0
    while scheduler.save_ahead():
        n_blocks += 1
        scheduler.check_integrity()
    return n_blocks


def test_cells_that_were_saved_ahead_are_evicted_at_once_and_can_be_loaded() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=50)
    for at in range(3):
        run_all(scheduler, engine, make_job([at] * 40, max_tokens=1))
    assert scheduler.cache_snapshot().entries == 2
    assert save_all_ahead(scheduler) == 3, "blocks of 16 tokens of the colder entry"
    assert scheduler.cache_snapshot().entries == 2
    assert not scheduler.has_work
    scheduler.submit(make_job([255] * 3, max_tokens=1, cache_prompt=False))
    scheduler.admit()
    scheduler.move(0.0)
    snapshot = scheduler.cache_snapshot()
    assert (snapshot.entries, snapshot.used_cells, snapshot.evictions) == (1, 40, 2)
    run_to_end(scheduler, engine)
    assert save_all_ahead(scheduler) == 0
    (end,) = run_all(scheduler, engine, make_job([1] * 40, max_tokens=1)).values()
    assert (end.stats.prefix_cache_tokens, end.stats.prefix_cache_tier) == (39, CacheTier.HOST)


def test_an_entry_is_saved_ahead_also_if_the_next_job_needs_only_its_sequence() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=2, n_seq_max=5, host_bytes=10**6)
    for at in range(3):
        run_all(scheduler, engine, make_job([at] * 40, max_tokens=1))
    n_blocks = save_all_ahead(scheduler)
    assert n_blocks > 0
    n_evicted = scheduler.cache_snapshot().evictions
    run_an_unrelated_job(scheduler, engine)
    assert 3 * (scheduler.cache_snapshot().evictions - n_evicted) == n_blocks


def test_an_entry_that_cannot_be_saved_is_not_tried_again_before_something_changes() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([1] * 40, max_tokens=1))
    engine.sequences.fail_saves()
    assert not scheduler.save_ahead()
    assert not scheduler.save_ahead(), "although the save would succeed now"
    run_all(scheduler, engine, make_job([2] * 40, max_tokens=1))
    assert save_all_ahead(scheduler) == 3


def test_an_idle_worker_saves_ahead_only_as_fast_as_the_disk_writes(tmp_path: Path) -> None:
    engine = FakeEngine(n_ctx=4000, n_batch=64, n_seq_max=7)
    n_bytes = len(struct.pack("<4sII16i", b"", 0, 0, *range(16)))  # of a block of 16 tokens
    files = DiskBlockFiles(tmp_path, "model", max_file_bytes=10**6, max_pending_bytes=4 * n_bytes)
    offload = BlockTransfers(BlockStore(16, 0, 10**6, can_cut=True), engine.sequences, files)
    scheduler = make_scheduler(
        engine, make_memory(engine, cache=RadixPrefixCache(), offload=offload, held_cells=0), clock=ManualClock()
    )
    run_all(scheduler, engine, make_job([1] * 160, max_tokens=1))
    n_blocks: list[int] = []
    while sum(n_blocks) < 10:
        go_on = Event()
        files.background.submit(go_on.wait, urgent=True)
        n_blocks.append(save_all_ahead(scheduler))
        go_on.set()
        assert files.background.flush(60)
    assert n_blocks == [3, 3, 3, 1]
    assert files.drain_failed_blocks() == []
    files.close(60)
