"""Which slot a job gets."""

from __future__ import annotations

from tests.support.prefix_cache_rig import ended, run_all, scheduler_with

from llamaq.worker.testing import make_job, run_to_end


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
