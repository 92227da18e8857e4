"""Jobs share prefixes: they reuse cached sequences, and wait for a job that computes the same prefix."""

from __future__ import annotations

import pytest
from tests.support.outputs import tokens_of
from tests.support.prefix_cache_rig import ended, leave, run_all, scheduler_with

from llamaq.common.protocol.job_outcome import CacheTier, FinishReason
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.testing import GreedySampler, ManualClock, make_job, run_tick, run_to_end

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
