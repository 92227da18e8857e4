"""Which cached entries are evicted, and when."""

from __future__ import annotations

import pytest
from tests.support.outputs import tokens_of
from tests.support.prefix_cache_rig import run_all, run_an_unrelated_job, scheduler_with

from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.testing import (
    FakeEngine,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    run_tick,
    run_to_end,
)


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


def scheduler_of_states(n_sequences: int) -> tuple[Scheduler, FakeEngine]:
    """Return a scheduler with two slots, whose sequences cannot be cut."""
    engine = FakeEngine(n_ctx=4000, n_batch=64, n_seq_max=n_sequences, can_cut=False)
    memory = make_memory(engine, n_slots=2, cache=RadixPrefixCache(can_cut=False))
    return make_scheduler(engine, memory, clock=ManualClock()), engine


def test_with_as_many_sequences_as_slots_a_long_prompt_evicts_no_conversation_of_another_job() -> None:
    scheduler, engine = scheduler_of_states(n_sequences=2)
    conversation = make_job([1] * 20, job_id="first", max_tokens=4)
    scheduler.submit(conversation)
    answer = tokens_of(run_to_end(scheduler, engine), "first")
    run_all(scheduler, engine, make_job([2] * 100, max_tokens=4))
    assert (scheduler.cache_snapshot().evictions, scheduler.cache_snapshot().entries) == (0, 2)
    (end,) = run_all(scheduler, engine, make_job([1] * 20 + answer + [3] * 9, max_tokens=4)).values()
    assert end.stats.prefix_cache_tokens == 23


def test_with_as_many_sequences_as_slots_a_prompt_is_computed_in_whole_chunks_and_followers_get_its_state() -> None:
    for n_sequences, sizes in ((2, [16]), (6, [5, 10, 1])):
        scheduler, engine = scheduler_of_states(n_sequences)
        job = make_job([1] * 16, max_tokens=1)
        job.system_tokens = 5
        run_all(scheduler, engine, job)
        assert [batch.n_prefill for batch in engine.batches if batch.n_prefill] == sizes
    scheduler, engine = scheduler_of_states(n_sequences=2)
    ends = run_all(scheduler, engine, *[make_job([1] * 50 + [at] * 9, job_id=f"{at}", max_tokens=1) for at in (2, 3)])
    assert [end.stats.prefix_cache_tokens for end in ends.values()] == [0, 50]
    assert engine.computed == 50 + 2 * 9
