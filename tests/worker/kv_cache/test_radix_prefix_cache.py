"""The prefix cache alone, and with a scheduler: shared prefixes, jobs that wait for one, eviction and namespaces."""

from __future__ import annotations

import struct
from pathlib import Path
from threading import Event

import pytest
from tests.support.outputs import tokens_of

from llamaq.common.protocol.job_outcome import CacheTier, FinishReason
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, Output
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, NullPrefixCache, PrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.testing import (
    FakeEngine,
    GreedySampler,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    run_tick,
    run_to_end,
)


def scheduler_with(
    cache: PrefixCache | None = None,
    n_ctx: int = 400,
    clock: ManualClock | None = None,
    *,
    n_slots: int = 2,
    n_seq_max: int = 7,
    host_bytes: int = 0,
    held_cells: int | None = None,
) -> tuple[Scheduler, FakeEngine]:
    engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=n_seq_max)
    memory = make_memory(
        engine,
        n_slots=n_slots,
        cache=RadixPrefixCache() if cache is None else cache,
        offload=BlockTransfers(BlockStore(16, host_bytes, can_cut=True), engine.sequences) if host_bytes else None,
        held_cells=held_cells,
        similarity=0.1,
    )
    return make_scheduler(engine, memory, clock=clock or ManualClock()), engine


def run_all(scheduler: Scheduler, engine: FakeEngine, *jobs: Job) -> dict[str, JobEnded]:
    for job in jobs:
        scheduler.submit(job)
    return {end.job.id: end for end in ended(run_to_end(scheduler, engine))}


def run_an_unrelated_job(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Run a job that shares no prefix. Meanwhile entries are evicted until they hold at most `held_cells` cells."""
    run_all(scheduler, engine, make_job([255] * 3, max_tokens=20, cache_prompt=False))


def ended(outputs: list[Output]) -> list[JobEnded]:
    return [output for output in outputs if isinstance(output, JobEnded)]


# ---- the cache alone


def make_run(tokens: list[int], order: int = 1, n_past: int = 0, scope: Scope | None = None) -> Run:
    job = make_job(tokens)
    job.scope = scope or Scope()
    return Run(job, 40 + order, tokens, n_past=n_past, admission_number=order, packed=pack(tokens))


def test_the_null_cache_stores_nothing() -> None:
    cache: PrefixCache = NullPrefixCache()
    assert cache.insert(5, pack([1, 2, 3]), Scope()) == [5]
    assert cache.match(pack([1, 2, 3]), Scope()).n_held == 0
    assert (len(cache), cache.coldest(), cache.entries()) == (0, None, [])
    cache.check_integrity()


def test_a_match_is_the_longest_prefix_among_entries_and_runs() -> None:
    cache = RadixPrefixCache()
    cache.insert(1, pack([1, 2, 3]), Scope())
    cache.insert(2, pack([1, 2, 9, 9, 9]), Scope())
    cache.add_run(run := make_run([1, 2, 3, 4, 5, 6], n_past=5))
    found = cache.match(pack([1, 2, 9, 9, 7]), Scope())
    assert isinstance(found.source, CachedSequence)
    assert (found.n_held, found.source.seq_id) == (4, 2)
    found = cache.match(pack([1, 2, 3, 4, 5, 6, 7]), Scope())
    assert (found.n_held, found.source, found.n_coming, found.leader) == (5, run, 6, run)
    cache.remove_run(run)
    assert cache.match(pack([1, 2, 3, 4, 5, 6, 7]), Scope()).n_held == 3
    assert cache.match(pack([5]), Scope()).source is None
    cache.check_integrity()


def test_only_runs_admitted_before_can_be_leaders() -> None:
    cache = RadixPrefixCache()
    for order in (1, 2):
        cache.add_run(make_run([7] * 20, order=order))
    found = cache.match(pack([7] * 20), Scope(), admitted_before=2)
    assert found.leader is not None
    assert found.leader.admission_number == 1
    assert cache.match(pack([7] * 20), Scope(), admitted_before=1).leader is None


def test_an_entry_whose_tokens_another_entry_begins_with_is_removed() -> None:
    cache = RadixPrefixCache()
    assert cache.insert(1, pack([1, 2, 3]), Scope()) == []
    assert cache.insert(2, pack([1, 2]), Scope()) == [2]
    assert cache.insert(3, pack([1, 2, 3, 4]), Scope()) == [1]
    assert cache.insert(4, pack([1, 2, 3, 4]), Scope("other")) == []
    assert [entry.seq_id for entry in cache.entries()] == [3, 4]


def test_a_state_that_cannot_be_cut_matches_only_with_all_its_tokens() -> None:
    cache = RadixPrefixCache(can_cut=False)
    assert cache.insert(1, pack([1, 2]), Scope()) == []
    assert cache.insert(2, pack([1, 2, 3, 4]), Scope()) == []
    assert cache.insert(3, pack([1, 2, 3, 4]), Scope()) == [3]
    assert cache.match(pack([1, 2, 3]), Scope()).n_held == 2
    assert cache.match(pack([1, 2, 3, 4, 5]), Scope()).n_held == 4
    assert cache.match(pack([1, 9]), Scope()).n_held == 0
    cache.add_run(make_run([1, 2, 3, 4, 5, 6, 7], n_past=6))
    assert cache.match(pack([1, 2, 3, 4, 5, 6]), Scope()).n_held == 6
    assert cache.match(pack([1, 2, 3, 4, 5]), Scope()).n_held == 4


def test_the_least_recently_used_entry_is_the_coldest_unless_it_is_in_transfer() -> None:
    cache = RadixPrefixCache()
    for seq_id in (1, 2, 3):
        cache.insert(seq_id, pack([seq_id] * 4), Scope())
    cache.match(pack([1, 1]), Scope())
    assert [entry.seq_id for entry in cache.entries()] == [2, 3, 1]
    coldest = cache.coldest()
    assert coldest is not None
    coldest.in_transfer = True
    assert cache.coldest() is cache.entries()[1]
    cache.remove(coldest)
    assert len(cache) == 2
    cache.check_integrity()


SECRET, PUBLIC = [7] * 10, [1] * 6


def test_namespaces_share_only_tokens_that_both_declare_public() -> None:
    cache = RadixPrefixCache()
    cache.insert(1, pack(PUBLIC + SECRET), Scope("a", public=6))
    for scope, expected in (
        (Scope("a", 6), 16),
        (Scope("a"), 16),
        (Scope("b", 6), 6),
        (Scope("b", 4), 4),
        (Scope("b", 16), 6),
        (Scope("b"), 0),
        (Scope(""), 0),
    ):
        assert cache.match(pack(PUBLIC + SECRET), scope).n_held == expected, scope
    assert cache.match(pack(SECRET), Scope("b", 10)).n_held == 0


# ---- sharing


PROMPTS = ["Once upon a time", "Once upon a midnight", "Once upon a time there was", "Twice", "Once upon a time"]


@pytest.mark.parametrize("n_ctx", [80, 120, 400])
@pytest.mark.parametrize("host_bytes", [0, 3_000, 10**6])
@pytest.mark.parametrize("held_cells", [0, 30, None])
def test_jobs_generate_the_same_tokens_with_and_without_a_cache(
    n_ctx: int, host_bytes: int, held_cells: int | None
) -> None:
    texts = []
    for cache in (NullPrefixCache(), RadixPrefixCache()):
        scheduler, engine = scheduler_with(cache, n_ctx, host_bytes=host_bytes, held_cells=held_cells)
        for at, prompt in enumerate(PROMPTS * 2):
            scheduler.submit(make_job(prompt, job_id=f"j{at}", max_tokens=12))
        outputs = run_to_end(scheduler, engine)
        assert len(ended(outputs)) == len(PROMPTS) * 2
        texts.append([tokens_of(outputs, f"j{at}") for at in range(len(PROMPTS) * 2)])
    assert texts[0] == texts[1]


def test_a_job_with_a_cached_prefix_computes_only_the_rest_and_reports_it_in_its_stats() -> None:
    scheduler, engine = scheduler_with(RadixPrefixCache())
    scheduler.submit(make_job([1] * 30, max_tokens=4))
    run_to_end(scheduler, engine)
    scheduler.submit(make_job([1] * 20 + [2] * 20, job_id="second", max_tokens=4))
    engine.batches.clear()
    (end,) = ended(run_to_end(scheduler, engine))
    assert sum(batch.n_prefill for batch in engine.batches) == 20
    assert (end.stats.prefix_cache_tokens, end.stats.prefix_cache_ratio) == (20, 0.5)
    snapshot = scheduler.cache_snapshot()
    assert (snapshot.hits, snapshot.misses, snapshot.entries) == (1, 1, 2)


def test_rates_count_only_computed_tokens() -> None:
    clock = ManualClock()
    scheduler, engine = scheduler_with(RadixPrefixCache(), clock=clock)
    scheduler.submit(make_job([1] * 30, max_tokens=1))
    run_to_end(scheduler, engine)
    scheduler.submit(make_job([1] * 20 + [2] * 6, resumed=[97, 98], max_tokens=5))
    scheduler.admit()
    clock.now_s += 2
    outputs = run_tick(
        scheduler, engine
    )  # computes the 8 tokens that are not cached, and samples the first token of this attempt
    for _ in range(2):
        clock.now_s += 0.5
        outputs += run_tick(scheduler, engine)
    (end,) = ended(outputs)
    assert (end.stats.prompt_eval_rate, end.stats.generation_rate) == (4, 2)
    assert (end.stats.prefix_cache_tokens, end.stats.prefix_cache_ratio) == (20, round(20 / 28, 4))


def test_the_last_token_of_a_fully_cached_prompt_is_computed_again() -> None:
    scheduler, engine = scheduler_with(RadixPrefixCache())
    for _ in range(2):
        scheduler.submit(make_job([1] * 30, max_tokens=4))
        (end,) = ended(run_to_end(scheduler, engine))
    assert end.stats.prefix_cache_tokens == 29
    assert end.reason is FinishReason.LENGTH


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


def test_jobs_without_cache_prompt_neither_read_nor_fill_the_cache() -> None:
    cache = RadixPrefixCache()
    scheduler, engine = scheduler_with(cache)
    for expected_entries, cache_prompt in enumerate([False, True, False]):
        scheduler.submit(make_job([1] * 30, max_tokens=4, cache_prompt=cache_prompt))
        (end,) = ended(run_to_end(scheduler, engine))
        assert end.stats.prefix_cache_tokens == 0
        assert len(cache) == min(expected_entries, 1)


def test_the_sequence_of_a_failed_job_is_not_cached() -> None:
    cache = RadixPrefixCache()
    scheduler, engine = scheduler_with(cache)
    scheduler.submit(make_job([1] * 30, max_tokens=9, sampler=GreedySampler(fails_at=3)))
    run_to_end(scheduler, engine)
    assert not len(cache)
    assert not engine.sequences.used_cells


def test_a_prefix_that_the_engine_cannot_copy_is_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, engine = scheduler_with(RadixPrefixCache())
    scheduler.submit(make_job([1] * 30, max_tokens=4))
    first = run_to_end(scheduler, engine)
    monkeypatch.setattr(engine.sequences, "copy", lambda source, target, n_tokens: 0)
    scheduler.submit(make_job([1] * 30, job_id="second", max_tokens=4))
    second = run_to_end(scheduler, engine)
    assert tokens_of(second, "second") == tokens_of(first)
    assert (scheduler.cache_snapshot().hits, ended(second)[0].stats.prefix_cache_tokens) == (0, 0)


def test_jobs_submitted_together_compute_their_common_prefix_once() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=8, n_seq_max=32)
    ends = run_all(scheduler, engine, *([make_job([1] * 200 + [2 + at] * 9, max_tokens=3) for at in range(8)]))
    assert engine.computed == 200 + 8 * 9 + 8 * 2
    assert [end.stats.prefix_cache_tokens for end in ends.values()] == [0] + [200] * 7
    assert {end.stats.prefix_cache_tier for end in ends.values()} == {None, CacheTier.RUNNING}


def test_a_follower_can_follow_another_follower() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=4, n_seq_max=32)
    prompts = [[1] * 60 + [2] * 60, [1] * 60 + [3] * 60, [1] * 60 + [3] * 50 + [4] * 9]
    run_all(scheduler, engine, *(make_job(prompt, max_tokens=1) for prompt in prompts))
    assert engine.computed == 120 + 60 + 9


def leave(scheduler: Scheduler, job: Job, how: str) -> None:
    assert scheduler.cancel(job.id) if how == "cancel" else scheduler.release(job.lease)


@pytest.mark.parametrize("how", ["cancel", "release", "fail"])
@pytest.mark.parametrize("ticks", [1, 3])
def test_when_the_leader_leaves_its_slot_a_follower_computes_the_rest(how: str, ticks: int) -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=4, n_seq_max=32)
    jobs = [make_job([1] * 100 + [at], job_id=f"j{at}", max_tokens=2) for at in range(4)]
    for job in jobs:
        scheduler.submit(job)
    for _ in range(ticks):
        run_tick(scheduler, engine)
    if how == "fail":
        engine.fail_job("j0")
    else:
        leave(scheduler, jobs[0], how)
    n_before = engine.computed
    ends = ended(run_to_end(scheduler, engine))
    assert sum(end.reason is FinishReason.LENGTH for end in ends) == 3
    n_cached = n_before if how == "cancel" else 0
    # The three remaining jobs compute the rest of the shared prefix once. Each of them also computes its last prompt
    # token and one generated token.
    assert engine.computed - n_before <= 100 - n_cached + 3 + 3


def test_a_job_does_not_wait_for_another_job_to_save_only_a_few_tokens() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000)
    scheduler.submit(make_job([1] * 5 + [2] * 50))
    scheduler.submit(make_job([1] * 5 + [3] * 50))
    run_tick(scheduler, engine)
    assert [slot.state for slot in scheduler.snapshot()] == ["prefill", "prefill"]


def test_jobs_that_reuse_many_tokens_overtake_others_but_not_too_often() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=1, n_seq_max=32)
    run_all(scheduler, engine, make_job([1] * 100, max_tokens=1))
    jobs = [make_job([2] * 100, job_id="cold", max_tokens=1)]
    jobs += [make_job([1] * 90 + [3 + at], job_id=f"warm{at}", max_tokens=1) for at in range(20)]
    order = list(run_all(scheduler, engine, *jobs))
    assert order.index("cold") == 8
    assert [name for name in order if name != "cold"] == [f"warm{at}" for at in range(20)]


def test_jobs_with_different_salts_share_no_token() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6)
    for salt in "aab":
        job = make_job([1] * 100, job_id=salt, max_tokens=1)
        job.scope = Scope(salt)
        end = run_all(scheduler, engine, job)[salt]
    assert end.stats.prefix_cache_tokens == 0
    assert scheduler.cache_snapshot().hits == 1


# ---- offload and load


def test_an_evicted_prefix_is_loaded_from_host_memory() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([1] * 100, max_tokens=4))
    assert scheduler.cache_snapshot().entries == 1
    run_an_unrelated_job(scheduler, engine)
    snapshot = scheduler.cache_snapshot()
    assert (snapshot.entries, snapshot.used_cells, snapshot.evictions) == (0, 0, 1)
    assert snapshot.host_bytes > 100
    (end,) = run_all(scheduler, engine, make_job([1] * 90 + [2] * 10, max_tokens=4)).values()
    assert (end.stats.prefix_cache_tokens, end.stats.prefix_cache_tier) == (90, CacheTier.HOST)


def test_a_job_that_loads_does_not_delay_the_ticks_of_others() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([1] * 160, max_tokens=1))
    run_an_unrelated_job(scheduler, engine)
    scheduler.submit(make_job([2] * 4, job_id="stream", max_tokens=30))
    run_tick(scheduler, engine)
    scheduler.submit(make_job([1] * 160 + [3], job_id="load", max_tokens=1))
    states = []
    for _ in range(8):
        outputs = run_tick(scheduler, engine)
        states += [slot.state for slot in scheduler.snapshot() if slot.job_id == "load"]
        assert len(tokens_of(outputs, "stream")) == 1
    assert states == ["load"] * 8  # each tick loads one block of 16 tokens, because its time budget is 0


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_a_job_can_be_cancelled_or_released_while_it_loads(how: str) -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([1] * 160, max_tokens=1))
    run_an_unrelated_job(scheduler, engine)
    loading = make_job([1] * 160)
    scheduler.submit(loading)
    run_tick(scheduler, engine)
    assert [slot.state for slot in scheduler.snapshot() if slot.job_id] == ["load"]
    leave(scheduler, loading, how)
    run_to_end(scheduler, engine)
    assert engine.sequences.used_cells == scheduler.cache_snapshot().used_cells == (16 if how == "cancel" else 0)


def test_cells_that_cannot_be_loaded_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([1] * 100, max_tokens=1))
    run_an_unrelated_job(scheduler, engine)
    monkeypatch.setattr(engine.sequences, "load", lambda *_: False)
    (end,) = run_all(scheduler, engine, make_job([1] * 100, max_tokens=4)).values()
    assert (end.reason, end.stats.prefix_cache_tokens) == (FinishReason.LENGTH, 0)


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


# ---- slots


def test_a_conversation_returns_to_its_slot_and_other_jobs_get_the_slot_idle_longest() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=3, n_seq_max=32)
    slots = {}
    for name, prompt in (("a", [1] * 40), ("b", [2] * 40), ("a again", [1] * 50), ("c", [3] * 40), ("d", [4] * 40)):
        slots[name] = run_all(scheduler, engine, make_job(prompt, job_id=name, max_tokens=1))[name].stats.slot
    assert slots["a again"] == slots["a"]
    assert slots["c"] not in (slots["a"], slots["b"])
    assert slots["d"] == slots["b"]


def test_a_pinned_job_waits_for_its_slot_and_does_not_delay_others() -> None:
    scheduler, engine = scheduler_with(n_ctx=4000, n_slots=2, n_seq_max=32)
    scheduler.submit(make_job([1] * 4, job_id="first", max_tokens=20, slot=1))
    scheduler.submit(make_job([2] * 4, job_id="pinned", max_tokens=3, slot=1))
    scheduler.submit(make_job([3] * 4, job_id="free", max_tokens=3))
    ends = ended(run_to_end(scheduler, engine))
    assert [(end.job.id, end.stats.slot) for end in ends] == [("free", 0), ("first", 1), ("pinned", 1)]


def test_a_job_for_an_unknown_slot_fails() -> None:
    scheduler, engine = scheduler_with()
    (end,) = run_all(scheduler, engine, make_job(slot=2)).values()
    assert end.error is not None
    assert "slot: 2, but this worker has slots 0 to 1" in end.error.message


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


def test_a_job_whose_cells_were_loaded_is_computed_in_the_same_tick() -> None:
    scheduler, engine = scheduler_with(host_bytes=10**6, held_cells=0)
    run_all(scheduler, engine, make_job([7] * 40, max_tokens=2))
    run_an_unrelated_job(scheduler, engine)
    scheduler.submit(make_job([7] * 30, max_tokens=1))
    scheduler.admit()
    assert not scheduler.plan()
    while not scheduler.plan():
        assert scheduler.move(0.0)
    assert scheduler.plan().n_prefill == 1
    run_to_end(scheduler, engine)
