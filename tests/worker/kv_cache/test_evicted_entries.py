"""Which cached entries are evicted, and when."""

from __future__ import annotations

import pytest
from tests.support.prefix_cache_rig import run_all, run_an_unrelated_job, scheduler_with

from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.testing import make_job, run_tick, run_to_end


def test_entries_are_evicted_when_a_job_needs_their_cells() -> None:
    cache = RadixPrefixCache()
    scheduler, engine = scheduler_with(cache, n_ctx=100)
    scheduler.submit(make_job([1] * 40, max_tokens=10))
    run_to_end(scheduler, engine)
    assert scheduler.cache_snapshot().used_cells == 49
    scheduler.submit(make_job([2] * 60, max_tokens=10))
    run_tick(scheduler, engine)
    assert scheduler.cache_snapshot().evictions == 1
    assert scheduler.cache_snapshot().entries == 0


def test_no_entry_is_evicted_if_the_room_would_still_be_too_small() -> None:
    cache = RadixPrefixCache()
    scheduler, engine = scheduler_with(cache, n_ctx=100)
    scheduler.submit(make_job([1] * 20, max_tokens=5))
    run_to_end(scheduler, engine)
    scheduler.submit(make_job([2] * 40, max_tokens=20))
    run_tick(scheduler, engine)
    scheduler.submit(make_job([3] * 60, max_tokens=20))
    run_tick(scheduler, engine)
    assert scheduler.cache_snapshot().evictions == 0
    assert scheduler.n_waiting == 1


def test_an_entry_is_evicted_when_a_job_needs_its_sequence() -> None:
    cache = RadixPrefixCache()
    scheduler, engine = scheduler_with(cache, n_ctx=4000)
    for number in range(9):
        scheduler.submit(make_job([number] * 10, max_tokens=2))
        run_to_end(scheduler, engine)
    assert scheduler.cache_snapshot().evictions == 4
    assert scheduler.cache_snapshot().entries == 5


def test_entries_hold_at_most_held_cells_while_a_job_runs_and_the_coldest_is_evicted_first() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, held_cells=100)
    for at in range(4):
        run_all(scheduler, engine, make_job([at] * 40, job_id=f"j{at}", max_tokens=1))
    run_an_unrelated_job(scheduler, engine)
    assert scheduler.cache_snapshot().used_cells == 80
    (end,) = run_all(scheduler, engine, make_job([2] * 40, max_tokens=1)).values()
    assert end.stats.prefix_cache_tokens == 39
    (end,) = run_all(scheduler, engine, make_job([1] * 40, max_tokens=1)).values()
    assert end.stats.prefix_cache_tokens == 0


@pytest.mark.parametrize("event", ["failed", "moved", "lost"])
def test_an_entry_that_a_job_has_shared_is_evicted_when_only_the_entry_holds_its_cells(event: str) -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([1] * 40, max_tokens=1))
    sharing = make_job([1] * 60, job_id="sharing", max_tokens=400)
    scheduler.submit(sharing)
    scheduler.submit(make_job([255] * 3, job_id="other", max_tokens=400))
    for _ in range(8):
        run_tick(scheduler, engine)
    assert scheduler.cache_snapshot().entries == 1, "its cells are those of a running job"
    match event:
        case "failed":
            engine.fail_job("sharing")
        case "moved":
            assert scheduler.release(sharing.lease)
        case "lost":
            engine.lose_cells("sharing")
    for _ in range(8):
        run_tick(scheduler, engine)
    snapshot = scheduler.cache_snapshot()
    assert (snapshot.entries, snapshot.evictions) == (0, 1)
    assert snapshot.host_bytes > 0
    scheduler.withdraw_all()


def test_the_cells_of_the_jobs_that_a_stopping_worker_withdraws_are_cached() -> None:
    scheduler, engine = scheduler_with()
    scheduler.submit(make_job([1] * 40, max_tokens=100))
    for _ in range(4):
        run_tick(scheduler, engine)
    scheduler.withdraw_all()
    assert scheduler.cache_snapshot().entries == 1
    assert scheduler.cache_snapshot().used_cells > 40


def test_entries_with_a_common_prefix_hold_at_most_held_cells_when_one_of_them_was_saved() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=30)
    for tail in (2, 3):
        run_all(scheduler, engine, make_job([1] * 40 + [tail] * 10, max_tokens=1))
    assert scheduler.cache_snapshot().shared_cells == 40
    scheduler.submit(make_job([255] * 3, max_tokens=400))
    for _ in range(12):
        run_tick(scheduler, engine)
    assert scheduler.cache_snapshot().entries == 0
    scheduler.withdraw_all()


def test_entries_beyond_held_cells_are_removed_before_a_new_prompt_is_computed() -> None:
    scheduler, engine = scheduler_with(host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([7] * 40, max_tokens=2))
    assert engine.sequences.used_cells == 41
    scheduler.submit(make_job([255] * 100, max_tokens=2))
    scheduler.admit()
    for _ in range(3):  # blocks of 16
        scheduler.move(0.0)
    assert engine.sequences.used_cells == 0
    run_to_end(scheduler, engine)
