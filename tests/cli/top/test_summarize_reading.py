"""The rates and sums that `llamaq top` shows, on plain data."""

from __future__ import annotations

import pytest
from tests.support.top_readings import (
    NOW_MS,
    job_id,
    make_letter,
    make_queue,
    make_reading,
    make_recent,
    make_summary,
    make_worker,
    totals,
)

from llamaq.cli.top.rates import RateTracker, WorkerRates, finish_rate
from llamaq.cli.top.summarize_reading import summarize
from llamaq.cli.top.table_columns import QUEUES
from llamaq.common.protocol.queue_and_worker_state import TenantDepth


def test_the_rates_of_a_worker_are_the_differences_of_two_heartbeats() -> None:
    tracker = RateTracker()
    tracker.update([make_worker(jobs={0: ("a", 10), 1: ("b", 5)}, ticks=100, totals=totals(1000, 2000, 5000))])
    assert tracker.of("w1") == WorkerRates()
    later = NOW_MS + 2000
    tracker.update(
        [make_worker(heartbeat_ms=later, jobs={0: ("a", 50), 2: ("c", 7)}, ticks=140, totals=totals(1080, 2400, 5400))]
    )
    rates = tracker.of("w1")
    assert (rates.tokens_per_s, rates.prompt_tokens_per_s) == (40.0, 200.0)
    assert (rates.tick_ms, rates.decode_per_tick, rates.prefill_per_tick) == (10.0, 2.0, 10.0)
    assert rates.of_jobs == {"a": 20.0}


def test_without_a_new_heartbeat_the_rates_stay_and_a_worker_that_left_is_forgotten() -> None:
    tracker = RateTracker()
    first, second = make_worker(), make_worker(heartbeat_ms=NOW_MS + 1000, totals=totals(10, 0, 0), ticks=1)
    tracker.update([first])
    tracker.update([second])
    tracker.update([second])
    assert tracker.of("w1").tokens_per_s == 10.0
    tracker.update([])
    tracker.update([make_worker(heartbeat_ms=NOW_MS + 3000, totals=totals(50, 0, 0))])
    assert tracker.of("w1") == WorkerRates()


def test_an_idle_worker_has_no_tick_time() -> None:
    tracker = RateTracker()
    tracker.update([make_worker(ticks=5)])
    tracker.update([make_worker(heartbeat_ms=NOW_MS + 1000, ticks=5)])
    assert tracker.of("w1") == WorkerRates(tokens_per_s=0.0, prompt_tokens_per_s=0.0)


def test_the_finish_rate_falls_while_no_job_ends() -> None:
    recent = [make_recent("chat", number, ended_ms=NOW_MS - number * 1000) for number in range(1, 6)]
    assert finish_rate(recent, NOW_MS) == pytest.approx(4 / 5)
    assert finish_rate(recent, NOW_MS + 15_000) == pytest.approx(4 / 20)
    assert finish_rate(recent, NOW_MS + 300_000) is None
    assert finish_rate(recent[:2], NOW_MS) == pytest.approx(1 / 2)
    assert finish_rate(recent[:1], NOW_MS) is None
    assert finish_rate([], NOW_MS) is None


def test_a_queue_has_the_sums_of_its_workers_and_the_time_until_its_waiting_jobs_have_ended() -> None:
    recent = tuple(make_recent("chat", number, ended_ms=NOW_MS - number * 1000) for number in range(1, 6))
    workers = (make_worker("w1", jobs={0: (job_id("chat", 1), 3)}), make_worker("w2"))
    chat = make_queue(waiting=8, running=1, workers=workers, recent=recent, oldest_waiting_s=4.0, n_dead=2)
    bulk = make_queue("bulk", waiting=5, mode="paused", oldest_waiting_s=60.0)
    overview = summarize(make_reading(chat, bulk), RateTracker())
    line, stopped = overview.queues
    assert (line.busy_slots, line.slots, line.workers, line.models) == (1, 8, 2, ("demo.gguf",))
    assert line.eta_s == pytest.approx(10.0)
    assert line.tokens_per_s is None
    assert (stopped.eta_s, stopped.jobs_per_s, stopped.mode) == (None, None, "paused")
    total = overview.total
    assert (total.waiting, total.running, total.workers, total.dead_letters) == (13, 1, 2, 2)
    assert (total.oldest_waiting_s, total.eta_s, total.mode) == (60.0, None, "mixed")
    (slot,) = overview.slots
    assert (slot.worker, slot.slot, slot.job_id, slot.generated_tokens) == ("w1", 0, job_id("chat", 1), 3)
    assert (overview.workers[0].hit_ratio, overview.workers[0].used_cells) == (0.75, 250)


def test_jobs_of_all_queues_are_in_one_order() -> None:
    chat = make_queue(
        recent=(make_recent("chat", 1, ended_ms=NOW_MS - 3000),),
        dead=(make_letter("chat", 1),),
    )
    bulk = make_queue("bulk", recent=(make_recent("bulk", 2, ended_ms=NOW_MS - 1000, error_code="internal"),))
    overview = summarize(make_reading(chat, bulk), RateTracker())
    assert [(line.queue, line.end, line.age_s) for line in overview.recent] == [
        ("bulk", "internal", 1.0),
        ("chat", "stop", 3.0),
    ]
    assert [line.age_s for line in overview.dead] == [5.0]


def test_waiting_jobs_are_sorted_by_age() -> None:
    jobs = (make_summary("chat", 1), make_summary("chat", 2, age_s=9.0))
    reading = make_reading(make_queue(listed=jobs))
    assert [line.age_s for line in summarize(reading, RateTracker()).waiting] == [9.0, 1.0]


def test_tenants_with_the_most_waiting_jobs_come_first() -> None:
    tenants = tuple(TenantDepth(tenant=name, waiting=waiting, claimed=1) for name, waiting in (("a", 1), ("b", 5)))
    overview = summarize(make_reading(make_queue(waiting=6, tenants=tenants)), RateTracker())
    (line,) = overview.queues
    assert [(one.tenant, one.waiting) for one in line.tenants] == [("b", 5), ("a", 1)]
    assert QUEUES.detail(line).endswith("waiting by tenant: b 5, a 1")
