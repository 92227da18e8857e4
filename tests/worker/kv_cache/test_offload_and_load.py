"""Evicted cells are offloaded to host memory, and loaded again for a later job."""

from __future__ import annotations

import pytest
from tests.support.outputs import tokens_of
from tests.support.prefix_cache_rig import leave, run_all, run_an_unrelated_job, scheduler_with

from llamaq.common.protocol.job_outcome import CacheTier, FinishReason
from llamaq.worker.testing import make_job, run_tick, run_to_end


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
