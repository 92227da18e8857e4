"""Bulk jobs get their share of the slot time while interactive jobs want all slots, and are rarely preempted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, Output
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.bulk_share import TURN_TICKS, BulkShare
from llamaq.worker.scheduling.preemption import PROTECTED_TOKENS
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.surplus_jobs import SURPLUS_AFTER_S
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, make_scheduler, run_tick

INTERACTIVE_TOKENS = 20


class Rig:
    """A scheduler that always has as many waiting interactive jobs as slots, while `saturated` is set."""

    def __init__(self, n_slots: int, share: float, n_ctx: int = 2000) -> None:
        self.engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=n_slots + 6)
        self.memory: KvMemory = make_memory(self.engine, n_slots=n_slots)
        self.clock = ManualClock()
        self.scheduler: Scheduler = make_scheduler(self.engine, self.memory, bulk_share=share, clock=self.clock)
        self.n_slots = n_slots
        self.saturated = True
        self.outputs: list[Output] = []
        self._numbers: Iterator[int] = count()

    def submit(self, job_id: str, *, n_prompt: int = 5, bulk: bool = True, **params: object) -> Job:
        job = make_job(
            [7] * n_prompt,
            job_id=job_id,
            priority="bulk" if bulk else "interactive",
            **params,  # type: ignore[arg-type]
        )
        self.scheduler.submit(job)
        return job

    def tick(self, times: int = 1) -> int:
        """Run ticks, and return how many slot ticks bulk jobs used."""
        n_bulk = 0
        for _ in range(times):
            while self.saturated and self.scheduler.n_waiting < 2 * self.n_slots:
                self.submit(f"i{next(self._numbers)}", bulk=False, max_tokens=INTERACTIVE_TOKENS)
            self.outputs += run_tick(self.scheduler, self.engine)
            n_bulk += sum(slot.priority is Priority.BULK for slot in self.memory.slots)
        return n_bulk

    @property
    def running(self) -> list[str]:
        return [slot.active.job.id for slot in self.memory.active_slots]

    def n_generated(self, job_id: str) -> int:
        return sum(isinstance(output, NewToken) and output.job.id == job_id for output in self.outputs)

    def has_ended(self, job_id: str) -> bool:
        return any(isinstance(output, JobEnded) and output.job.id == job_id for output in self.outputs)


@pytest.mark.parametrize(("n_slots", "share"), [(1, 0.1), (4, 0.1), (2, 0.5), (3, 0.25)])
def test_bulk_jobs_get_their_share_of_the_slot_time_although_interactive_jobs_want_all_of_it(
    n_slots: int, share: float
) -> None:
    rig = Rig(n_slots, share)
    for number in range(n_slots):
        rig.submit(f"bulk{number}", context_limit=1900)
    n_ticks = 2000
    used = rig.tick(n_ticks) / (n_ticks * n_slots)
    assert share * 0.75 < used < share * 1.25


def test_with_a_share_of_zero_a_bulk_job_runs_only_when_no_interactive_job_wants_the_slot() -> None:
    rig = Rig(n_slots=2, share=0)
    rig.submit("bulk", max_tokens=5)
    assert rig.tick(500) == 0
    rig.saturated = False
    rig.tick(100)
    assert rig.has_ended("bulk")


@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_an_interactive_job_gets_a_slot_in_the_next_tick_when_only_bulk_jobs_run(n_slots: int) -> None:
    rig = Rig(n_slots, share=0.1)
    for number in range(2 * n_slots):
        rig.submit(f"bulk{number}", context_limit=1900)
    rig.tick(50)
    rig.saturated = False
    while any(slot.priority is not Priority.BULK for slot in rig.memory.slots):
        rig.tick()
    rig.tick(100)  # bulk jobs are then owed nothing
    for number in range(20):  # each of them preempts a bulk job, and some bulk jobs were preempted a moment ago
        rig.submit(f"urgent{number}", bulk=False, max_tokens=2)
        rig.tick()
        assert f"urgent{number}" in rig.running
        rig.tick(3)


def test_a_preempted_bulk_job_keeps_its_next_slot_for_some_tokens() -> None:
    rig = Rig(n_slots=2, share=0)
    rig.saturated = False
    rig.submit("other", bulk=False, context_limit=1900)
    rig.submit("bulk", max_tokens=300)
    n_urgent = 0
    while not rig.has_ended("bulk"):  # an interactive job arrives every other tick
        n_urgent += 1
        rig.submit(f"urgent{n_urgent}", bulk=False, max_tokens=1)
        rig.tick(2)
        while rig.scheduler.n_waiting and "bulk" in rig.running:
            rig.tick()
    assert rig.n_generated("bulk") == 300
    assert 2 < rig.scheduler.cache_snapshot().preemptions <= 300 // PROTECTED_TOKENS + 1


def test_a_large_bulk_job_gets_its_room_although_small_interactive_jobs_always_fit() -> None:
    rig = Rig(n_slots=3, share=0.1, n_ctx=120)
    rig.tick()
    rig.submit("large", n_prompt=100, max_tokens=10)
    for _ in range(1000):
        if rig.has_ended("large"):
            return
        rig.tick()
    raise AssertionError("the large bulk job never ran")


def test_the_bulk_jobs_that_a_worker_claims_ahead_are_as_many_as_its_share_of_the_slots() -> None:
    share = BulkShare(0.25, 6)
    assert [share.n_to_claim(n_bulk) for n_bulk in range(4)] == [2, 1, 0, 0]
    assert BulkShare(0, 6).n_to_claim(0) == 0
    assert BulkShare(0.01, 1).n_to_claim(0) == 1


def test_a_turn_begins_when_enough_slot_ticks_are_owed_and_ends_when_none_are_owed() -> None:
    share = BulkShare(0.25, 4)
    for _ in range(TURN_TICKS - 1):
        share.record_tick(4, 0, 1)
    assert (share.is_owed, share.is_due(0)) == (True, False)
    share.record_tick(4, 0, 1)
    assert (share.is_due(0), share.is_due(1)) == (True, False)
    for _ in range(TURN_TICKS):
        share.record_tick(2, 1, 0)
        share.record_tick(2, 1, 0)
    assert not share.is_owed
    assert repr(share) == "<BulkShare 25% owed=0.0 slot ticks>"


def test_only_bulk_jobs_that_waited_for_some_time_without_a_slot_are_withdrawn() -> None:
    rig = Rig(n_slots=2, share=0)
    rig.saturated = False
    rig.submit("has had a slot")
    rig.tick()
    for number in range(2):
        rig.submit(f"urgent{number}", bulk=False)
    rig.tick()
    for number in range(4):
        rig.submit(f"bulk{number}")
    rig.clock.now_s += SURPLUS_AFTER_S / 2
    assert rig.scheduler.withdraw_surplus(3) == []
    rig.clock.now_s += SURPLUS_AFTER_S
    assert [job.id for job in rig.scheduler.withdraw_surplus(2)] == ["bulk3", "bulk2", "bulk1", "bulk0"]
    assert rig.scheduler.n_waiting == 1
