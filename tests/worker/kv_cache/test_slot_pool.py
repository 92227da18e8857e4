from __future__ import annotations

import pytest

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Slot, SlotState
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.testing import GreedySampler, make_job


def can_acquire(pool: SlotPool, job: Job) -> bool:
    """Return whether the pool has an idle slot, a free sequence and enough cells for the job."""
    return pool.n_free_sequences > 0 and pool.has_slot(job) and pool.missing_cells(pool.cells_to_admit(job)) == 0


def test_a_job_is_acquired_only_when_its_prompt_and_a_margin_fit_beside_the_margins_of_the_running_jobs() -> None:
    pool = SlotPool(4, 100, 4, margin=20)
    slot = pool.acquire(make_job([7] * 40, max_tokens=1000, priority="bulk"), 0.0)
    assert (pool.promised_cells, pool.reserved_cells) == (60, 60)
    assert pool.slots[0].priority is Priority.BULK
    assert can_acquire(pool, make_job([7] * 20))
    assert not can_acquire(pool, make_job([7] * 21))
    assert can_acquire(pool, make_job([7] * 35, max_tokens=5))
    assert pool.missing_cells(pool.cells_to_admit(make_job([7] * 25))) == 5
    slot.active.n_past = 40
    pool.resize(slot.active.seq_id, 40)
    assert (pool.promised_cells, pool.reserved_cells) == (20, 60)


def test_the_margin_doubles_each_time_a_job_lost_its_slot_because_cells_ran_out() -> None:
    pool = SlotPool(4, 500, 4, margin=20)
    job = make_job([7] * 40, context_limit=400)
    needed = []
    for job.n_out_of_cells in (0, 1, 2, 3, 4, 400):
        needed.append(pool.cells_to_admit(job))
    assert needed == [60, 80, 120, 200, 360, 400]
    job.generated_before = [7] * 100
    job.n_out_of_cells = 0
    assert pool.cells_to_admit(job) == 160


def test_running_jobs_lack_cells_when_their_next_tokens_do_not_fit() -> None:
    pool = SlotPool(2, 50, 2, margin=20)
    slot = pool.acquire(make_job([7] * 40), 0.0)
    slot.active.n_past = 40
    pool.resize(slot.active.seq_id, 40)
    slot.active.tokens += [1] * 6
    assert (pool.lacks_cells(), pool.lacks_cells(4), pool.lacks_cells(5)) == (False, False, True)
    assert pool.missing_cells(0) == 16  # the margin of 20 ends at token 66


def test_without_an_idle_slot_no_job_is_acquired() -> None:
    pool = SlotPool(1, 1000, 4)
    pool.acquire(make_job(max_tokens=1), 0.0)
    assert not can_acquire(pool, make_job(max_tokens=1))
    assert not pool.could_admit(make_job(max_tokens=1))


def test_a_cell_that_running_jobs_share_counts_once_for_the_room_that_a_job_would_have() -> None:
    pool = SlotPool(3, 200, 4, margin=10)
    first, second, third = (pool.acquire(make_job([7] * 100, max_tokens=50), 0.0) for _ in range(3))
    pool.resize(first.active.seq_id, 100)
    for slot in (second, third):
        pool.share(first.active.seq_id, slot.active.seq_id, 90)
        slot.active.n_past = 90
    first.active.n_past = 100
    small, large = make_job([8] * 60), make_job([8] * 80)
    assert not pool.could_admit(small), "no slot is idle"
    assert pool.could_admit(small, [third])  # 100 cells, the margins of 10 and 20, and 60 + 10 for the job
    assert not pool.could_admit(large, [third])
    assert not pool.could_admit(large, [third], n_shared=19)
    assert pool.could_admit(large, [third], n_shared=20)
    pool.release(first)
    assert pool.could_admit(large, [third])  # 90 cells, the margin of 20, and 80 + 10 for the job
    assert not pool.could_admit(make_job([8] * 81), [third])


def test_a_released_sequence_belongs_to_the_cache_with_its_cells_until_it_is_freed() -> None:
    pool = SlotPool(1, 100, 1, margin=20)
    slot = pool.acquire(make_job([7] * 30, max_tokens=30), 0.0)
    slot.active.n_past = 45
    pool.resize(slot.active.seq_id, 45)
    slot.active.tokens += [1] * 15
    assert (pool.ledger.used, pool.promised_cells) == (45, 15)
    run = pool.release(slot)
    assert (slot.state, slot.run) == (SlotState.IDLE, None)
    assert (pool.cached, pool.ledger.used, pool.promised_cells) == ({run.seq_id}, 45, 0)
    other = make_job([7] * 5, max_tokens=5)
    assert not can_acquire(pool, other)  # no sequence is free, though a slot is idle
    assert pool.could_admit(other)
    pool.free_sequence(run.seq_id)
    assert can_acquire(pool, other)
    pool.check_integrity()


def test_more_slots_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="4 slots need as many sequences, there are 3"):
        SlotPool(4, 100, 3)


def damage(pool: SlotPool, slot: Slot, how: str) -> None:
    match how:
        case "two owners":
            pool.slots[1].run = slot.run
            pool.slots[1].state = SlotState.PREFILL
        case "lost sequence":
            pool._free.pop()
        case "too many cells":
            pool.n_cells = 5
        case "state without job":
            pool.slots[1].state = SlotState.DECODE
        case "nothing pending":
            slot.active.n_past = len(slot.active.tokens)
        case "decode with a gap":
            slot.state = SlotState.DECODE
        case "other prompt":
            slot.active.tokens[0] += 1
        case "beyond the limit":
            slot.active.job.context_limit = 8


@pytest.mark.parametrize(
    "how",
    [
        "two owners",
        "lost sequence",
        "too many cells",
        "state without job",
        "nothing pending",
        "decode with a gap",
        "other prompt",
        "beyond the limit",
    ],
)
def test_the_integrity_check_finds_damage(how: str) -> None:
    pool = SlotPool(2, 100, 3)
    slot = pool.acquire(make_job([7] * 8, max_tokens=4), 0.0)
    pool.check_integrity()
    damage(pool, slot, how)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_a_job_gets_a_sequence_whose_last_job_needed_as_many_logits() -> None:
    pool = SlotPool(4, 1000, 4)

    def run_job(n_largest: int | None) -> int:
        sampler = GreedySampler()
        sampler.n_largest = n_largest
        slot = pool.acquire(make_job(sampler=sampler, max_tokens=1), 0.0)
        run = pool.release(slot)
        pool.free_sequence(run.seq_id)
        return run.seq_id

    first = run_job(1)
    needing_all = run_job(None)
    assert needing_all == first, "no sequence has had such a job: the one that was used last is taken"
    others = [run_job(256) for _ in range(3)]
    assert others == [others[0]] * 3
    assert others[0] != needing_all
    assert run_job(257) == needing_all
    assert run_job(40) == others[0]
