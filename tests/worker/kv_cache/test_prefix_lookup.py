"""A lookup is remembered until a longer prefix may be there or what it names is gone. A job is admitted only with a new
lookup.
"""

from __future__ import annotations

import pytest

from llamaq.common.protocol.job_outcome import CacheTier, FinishReason
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.eviction import Room
from llamaq.worker.kv_cache.offload_interface import NoOffload
from llamaq.worker.kv_cache.prefix_cache_interface import DeviceMatch
from llamaq.worker.kv_cache.prefix_lookup import Candidate, PrefixLookup
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.scheduling.waiting_queue import MAX_COMPARED_JOBS
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler, next_letter, run_tick, run_to_end

BLOCK_TOKENS = 4
pytestmark = pytest.mark.interpreted  # CountingCache inherits from a compiled class


class CountingCache(RadixPrefixCache):
    """Counts the lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.n_lookups = 0

    def match(self, tokens: bytes, scope: Scope, admitted_before: int | None = None) -> DeviceMatch:
        self.n_lookups += 1
        return super().match(tokens, scope, admitted_before)


class Rig:
    """A scheduler whose cache counts lookups."""

    def __init__(self, n_slots: int, n_ctx: int = 1000, *, host_bytes: int = 0) -> None:
        self.engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=n_slots + 5)
        self.cache = CountingCache()
        store = BlockStore(BLOCK_TOKENS, host_bytes, can_cut=True)
        offload = BlockTransfers(store, self.engine.sequences) if host_bytes else None
        memory = make_memory(self.engine, n_slots=n_slots, cache=self.cache, offload=offload)
        self.scheduler = make_scheduler(self.engine, memory)

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.submit(job)

    def lookups_of_a_tick(self) -> int:
        before = self.cache.n_lookups
        run_tick(self.scheduler, self.engine)
        return self.cache.n_lookups - before

    def finish(self) -> list[JobEnded]:
        outputs = run_to_end(self.scheduler, self.engine)
        return [output for output in outputs if isinstance(output, JobEnded)]

    @property
    def running(self) -> list[str | None]:
        return [slot.job_id for slot in self.scheduler.snapshot()]


def test_compared_jobs_are_looked_up_once_and_again_before_their_admission() -> None:
    rig = Rig(n_slots=4)
    rig.submit(*(make_job([at] * 20, max_tokens=5) for at in range(3)))
    assert rig.lookups_of_a_tick() == 3 + 2  # the three that are compared; the second and third, when they are admitted
    assert rig.lookups_of_a_tick() == 0


def test_one_admission_takes_two_lookups_at_most_beside_many_waiting_jobs() -> None:
    rig = Rig(n_slots=4, n_ctx=4000)
    rig.submit(*(make_job([1] * 20 + [2 + at], max_tokens=1 + at % 7) for at in range(60)))
    n_lookups = 0
    while rig.scheduler.n_waiting:
        n_lookups += rig.lookups_of_a_tick()
    n_without_hit = MAX_COMPARED_JOBS  # these jobs were looked up before the first job ran, and again after that
    assert n_lookups <= 2 * 60 + 2 * n_without_hit


def test_a_job_overtakes_when_another_job_has_ended_whose_answer_begins_its_prompt() -> None:
    rig = Rig(n_slots=2)
    question = [1] * 30
    rig.submit(make_job(question, job_id="question", max_tokens=40, slot=0))
    rig.submit(make_job([9] * 5, job_id="other", max_tokens=50, slot=1))
    run_tick(rig.scheduler, rig.engine)
    answer = list(question)
    while len(answer) < 69:
        answer.append(next_letter(answer))
    rig.submit(make_job([2] * 30, job_id="unrelated", max_tokens=3, slot=0))
    rig.submit(make_job([*answer, 5], job_id="next turn", max_tokens=3, slot=0))
    admitted: list[str] = []
    while rig.scheduler.has_work:
        run_tick(rig.scheduler, rig.engine)
        admitted += [job_id for job_id in rig.running if job_id and job_id not in admitted]
    assert admitted == ["question", "other", "next turn", "unrelated"]


def test_a_cancelled_job_is_not_remembered() -> None:
    rig = Rig(n_slots=3, n_ctx=100)
    rig.submit(make_job([1] * 75, job_id="running", max_tokens=15))
    run_tick(rig.scheduler, rig.engine)
    rig.submit(make_job([2] * 20, job_id="waiting", max_tokens=1))
    assert rig.lookups_of_a_tick() == 1
    rig.scheduler.cancel("waiting")
    rig.scheduler.check_integrity()


def test_a_job_that_waits_for_room_is_looked_up_once_and_again_before_its_admission() -> None:
    rig = Rig(n_slots=3, n_ctx=100)
    rig.submit(make_job([1] * 75, job_id="running", max_tokens=15))
    assert rig.lookups_of_a_tick() == 1
    rig.submit(make_job([2] * 20, max_tokens=1), make_job([3] * 30, max_tokens=1))
    n_lookups = [rig.lookups_of_a_tick() for _ in range(6)]
    assert n_lookups == [2, 0, 0, 0, 0, 0]
    assert rig.running == ["running", None, None]
    rig.scheduler.cancel("running")
    assert rig.lookups_of_a_tick() == 2  # one for each admission
    assert rig.scheduler.n_waiting == 0


def test_a_waiting_job_uses_what_a_running_job_computed_after_the_first_lookup() -> None:
    rig = Rig(n_slots=2, n_ctx=100)
    rig.submit(make_job([1] * 60, job_id="running", max_tokens=30, slot=0))
    run_tick(rig.scheduler, rig.engine)
    rig.submit(make_job([1] * 59 + [2] * 15, job_id="sharing", max_tokens=5))
    assert rig.running == ["running", None]
    for _ in range(5):
        run_tick(rig.scheduler, rig.engine)
    assert rig.running == ["running", "sharing"]
    stats = {end.job.id: end.stats for end in rig.finish()}
    assert stats["sharing"].prefix_cache_tokens == 59


def test_while_all_slots_are_busy_no_prefix_is_looked_up() -> None:
    rig = Rig(n_slots=1)
    rig.submit(make_job([1] * 20, max_tokens=40), make_job([2] * 20, max_tokens=40))
    assert rig.lookups_of_a_tick() == 2
    assert rig.lookups_of_a_tick() == 0


def test_the_eviction_of_other_entries_does_not_repeat_the_lookup() -> None:
    rig = Rig(n_slots=2, n_ctx=100)
    rig.submit(make_job([1] * 40, max_tokens=2))
    rig.finish()
    rig.submit(make_job([2] * 40, max_tokens=2))
    rig.finish()
    rig.submit(make_job([2] * 40 + [3] * 30, job_id="third", max_tokens=20))
    assert rig.lookups_of_a_tick() == 1
    assert rig.scheduler.cache_snapshot().evictions == 1
    (end,) = rig.finish()
    assert end.stats.prefix_cache_tokens == 40


def test_while_cells_are_moved_only_jobs_that_reuse_stored_blocks_are_looked_up_again() -> None:
    rig = Rig(n_slots=2, n_ctx=100, host_bytes=10**6)
    for token in (1, 2):  # the second job evicts the cells of the first one
        rig.submit(make_job([token] * 60, max_tokens=1))
        rig.finish()
    # To make room for the first of these jobs, the cells of the second entry are saved, one block in each tick.
    rig.submit(make_job([3] * 70, job_id="first", max_tokens=1), make_job([1] * 65, job_id="stored", max_tokens=1))
    rig.submit(*(make_job([token] * 65, max_tokens=1) for token in (5, 6, 7)))
    assert rig.lookups_of_a_tick() == 5
    assert rig.running == [None, None]
    n_lookups = [rig.lookups_of_a_tick() for _ in range(10)]
    assert n_lookups == [1] * 10
    reused = {end.job.id: end.stats.prefix_cache_tokens for end in rig.finish()}
    assert reused["stored"] > 0
    assert reused["first"] == 0


def test_the_cells_of_a_stale_hit_do_not_count_as_room() -> None:
    rig = Rig(n_slots=2, n_ctx=100)
    rig.submit(make_job([1] * 44, max_tokens=2))
    rig.finish()
    rig.submit(make_job([2] * 42, job_id="running", max_tokens=20))
    run_tick(rig.scheduler, rig.engine)
    # The job would fit if it reused 21 tokens of the entry. But this entry must be evicted to free enough cells.
    rig.submit(make_job([1] * 21 + [3] * 25, job_id="waiting", max_tokens=20))
    assert rig.lookups_of_a_tick() == 2
    assert rig.running == [None, "running"]
    assert rig.scheduler.cache_snapshot().evictions == 1
    ends = rig.finish()
    assert [(end.job.id, end.reason) for end in ends] == [
        ("running", FinishReason.LENGTH),
        ("waiting", FinishReason.LENGTH),
    ]
    assert ends[1].stats.prefix_cache_tokens == 0


def test_a_stale_hit_is_replaced_by_the_next_longest_prefix() -> None:
    rig = Rig(n_slots=2, n_ctx=100)
    rig.submit(make_job([1] * 30, job_id="running", max_tokens=20))
    for _ in range(3):
        run_tick(rig.scheduler, rig.engine)
    rig.submit(make_job([1] * 30 + [5] * 40, job_id="cached", max_tokens=2))
    while rig.scheduler.n_waiting or "cached" in rig.running:
        run_tick(rig.scheduler, rig.engine)
    rig.submit(make_job([1] * 30 + [5] + [6] * 9, job_id="last", max_tokens=10))
    evictions = rig.scheduler.cache_snapshot().evictions
    assert rig.lookups_of_a_tick() == 2
    assert set(rig.running) == {"running", "last"}
    assert rig.scheduler.cache_snapshot().evictions == evictions + 1
    stats = {end.job.id: end.stats for end in rig.finish()}
    assert (stats["last"].prefix_cache_tokens, stats["last"].prefix_cache_tier) == (30, CacheTier.RUNNING)


def test_a_job_whose_entry_was_evicted_for_an_earlier_job_is_looked_up_again() -> None:
    rig = Rig(n_slots=3, n_ctx=100)
    for at in (1, 2):
        rig.submit(make_job([at] * 30, max_tokens=2))
        rig.finish()
    rig.submit(make_job([7] * 20, job_id="running", max_tokens=40))
    run_tick(rig.scheduler, rig.engine)
    # The first job does not fit, although both entries are evicted for it. The second job matched one of them.
    rig.submit(make_job([1] * 30 + [3] * 40, job_id="large", max_tokens=9))
    rig.submit(make_job([1] * 30 + [4] * 2, job_id="small", max_tokens=2))
    run_tick(rig.scheduler, rig.engine)
    assert set(rig.running) == {"running", "small", None}
    stats = {end.job.id: end.stats for end in rig.finish()}
    assert stats["small"].prefix_cache_tokens == 0


def test_the_tokens_that_running_jobs_hold_for_a_job_do_not_count_if_the_job_might_not_copy_them() -> None:
    cache = RadixPrefixCache()
    leader = make_job([1] * 100)
    run = Run(leader, 0, leader.prompt, n_past=50, packed=leader.packed)
    cache.add_run(run)
    lookup, whole = (PrefixLookup(cache, NoOffload(), can_save_parts=can) for can in (True, False))
    near, far = make_job([1] * 65 + [2]), make_job([1] * 66 + [2])
    assert lookup.n_held_by(near, {run}) == 50
    assert lookup.n_held_by(near, frozenset()) == 0
    assert lookup.n_held_by(far, {run}) == 0, "the job would wait for the run, so its admission copies nothing"
    assert lookup.n_held_by(make_job([1] * 65, cache_prompt=False), {run}) == 0
    assert whole.n_held_by(near, {run}) == 0


@pytest.mark.parametrize("n_tail", range(5, 30))
def test_a_job_could_be_admitted_beside_a_run_only_if_there_is_room_with_its_remembered_prefix(n_tail: int) -> None:
    memory = make_memory(FakeEngine(n_ctx=100), n_slots=2, cache=RadixPrefixCache(), margin=8)
    first, job = make_job([1] * 60), make_job([1] * 50 + [2] * n_tail)
    candidate = Candidate(first, memory.find_prefix(first))
    assert memory.make_room(candidate) is Room.AVAILABLE
    slot = memory.admit(candidate, 0.0)
    memory.record_progress(slot, 40)
    remembered = memory.find_prefix(job)
    memory.record_progress(slot, 50)
    assert memory.find_prefix(job) is remembered
    room = memory.make_room(Candidate(job, remembered))
    assert memory.could_admit(job, []) is (room is Room.AVAILABLE) is (n_tail <= 14)
