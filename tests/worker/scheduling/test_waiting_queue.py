"""Jobs of several tenants in one worker take turns."""

from __future__ import annotations

from tests.support.ticked_jobs import TickedJobs

from llamaq.worker.testing import make_job


def test_a_job_waits_for_one_job_of_another_tenant_and_not_for_all_that_were_claimed_before() -> None:
    rig = TickedJobs(n_slots=1)
    jobs = [make_job("aaaa", job_id=f"a{number}", tenant="a", max_tokens=3) for number in range(3)]
    rig.submit(*jobs)
    rig.tick()
    rig.submit(make_job("bbbb", job_id="b", tenant="b", max_tokens=3))
    order = rig.running
    while rig.scheduler.has_work:
        rig.tick()
        order += [job_id for job_id in rig.running if job_id not in order]
    assert order == ["a0", "b", "a1", "a2"]


def test_a_job_that_another_worker_began_waits_for_no_job_of_another_tenant() -> None:
    rig = TickedJobs(n_slots=1)
    rig.submit(make_job("aaaa", job_id="a0", tenant="a", max_tokens=3))
    rig.tick()
    rig.submit(make_job("bbbb", job_id="b", tenant="b", max_tokens=3))
    rig.submit(make_job("aaaa", job_id="a1", tenant="a", resumed=[66, 67], max_tokens=5))
    while rig.running == ["a0"]:
        rig.tick()
    rig.tick()
    assert rig.running == ["a1"]
    rig.finish()


def test_a_free_slot_goes_to_the_tenant_with_the_fewest_running_jobs() -> None:
    rig = TickedJobs(n_slots=3)
    rig.submit(*(make_job("x", job_id=f"a{number}", tenant="a", max_tokens=50) for number in range(4)))
    rig.submit(*(make_job("x", job_id=f"-{number}", max_tokens=2) for number in range(3)))
    rig.tick()
    assert sorted(rig.running) == ["-0", "a0", "a1"]
    while "-0" in rig.running:
        rig.tick()
    rig.tick()
    assert sorted(rig.running) == ["-1", "a0", "a1"]
    rig.finish()


def test_a_longer_cached_prefix_does_not_pass_a_job_of_another_tenant() -> None:
    rig = TickedJobs(n_slots=1)
    prefix = "the same first words of all prompts of one tenant, "
    rig.submit(make_job(prefix + "first", job_id="a0", tenant="a", max_tokens=2))
    rig.tick()
    rig.submit(*(make_job(prefix + str(number), job_id=f"a{number}", tenant="a", max_tokens=2) for number in (1, 2)))
    rig.submit(make_job("another prompt", job_id="b", tenant="b", max_tokens=2))
    order = rig.running
    while rig.scheduler.has_work:
        rig.tick()
        order += [job_id for job_id in rig.running if job_id not in order]
    assert order.index("b") <= 2
