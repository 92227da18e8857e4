from __future__ import annotations

import itertools

import pytest

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import TRANSITIONS, Slot, SlotState
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.testing import make_job


def can_acquire(pool: SlotPool, job: Job) -> bool:
    """Whether there are an idle slot, a free sequence and enough cells for the job."""
    return pool.n_free_sequences > 0 and pool.has_slot(job) and pool.missing_cells(job.reservation) == 0


def test_a_slot_obeys_the_table_of_transitions_and_no_state_goes_to_itself() -> None:
    for before, after in itertools.product(SlotState, SlotState):
        slot = Slot(0, before)
        if after in TRANSITIONS[before]:
            slot.transition_to(after)
            assert slot.state is after
        else:
            with pytest.raises(ValueError, match=after.name):
                slot.transition_to(after)
            assert slot.state is before
    assert all(state not in TRANSITIONS[state] for state in SlotState)


def test_the_repr_of_a_slot_shows_its_state_and_progress() -> None:
    pool = SlotPool(2, 100, 2)
    slot = pool.acquire(make_job([7] * 8, job_id="j1", max_tokens=9), 5.0)
    assert repr(pool.slots[1]) == "<Slot 1 IDLE>"
    assert repr(slot) == "<Slot 0 PREFILL 0/8 job=j1>"
    run = slot.active
    run.n_past = 6
    assert repr(slot) == "<Slot 0 PREFILL 6/8 job=j1>"
    run.n_past = 8
    run.tokens.append(3)
    slot.transition_to(SlotState.DECODE)
    assert repr(slot) == "<Slot 0 DECODE 1/9 job=j1>"
    assert (run.n_prompt, run.n_generated, run.n_pending, run.admitted_s) == (8, 1, 1, 5.0)


def test_a_snapshot_counts_prompt_and_generated_tokens_separately() -> None:
    pool = SlotPool(1, 100, 1)
    assert pool.slots[0].snapshot().model_dump(exclude_defaults=True) == {"index": 0, "state": "idle"}
    slot = pool.acquire(make_job([7] * 8, job_id="j1", resumed=[1, 2], max_tokens=9), 0.0)
    slot.active.n_past = 9
    assert slot.snapshot().model_dump() == {
        "index": 0,
        "state": "prefill",
        "job_id": "j1",
        "prompt_tokens": 8,
        "prefilled_tokens": 8,
        "generated_tokens": 2,
        "content_tokens": 9,
    }


def test_an_idle_slot_has_no_pending_tokens_and_no_job() -> None:
    slot = SlotPool(1, 10, 1).slots[0]
    assert (slot.n_pending, slot.priority) == (0, None)
    with pytest.raises(LookupError, match="runs no job"):
        _ = slot.active


def test_a_job_is_acquired_only_when_prompt_and_answer_can_be_reserved() -> None:
    pool = SlotPool(4, 100, 4)
    pool.acquire(make_job([7] * 40, max_tokens=30, priority="bulk"), 0.0)
    assert pool.promised_cells == 70
    assert pool.slots[0].priority is Priority.BULK
    assert can_acquire(pool, make_job([7] * 10, max_tokens=20))
    assert not can_acquire(pool, make_job([7] * 10, max_tokens=21))
    assert pool.missing_cells(make_job([7] * 10, max_tokens=25).reservation) == 5


def test_a_reservation_ends_at_the_context_limit() -> None:
    assert make_job([7] * 10, max_tokens=1000, context_limit=64).reservation == 64
    assert make_job([7] * 10, max_tokens=4, context_limit=64).reservation == 14


def test_without_an_idle_slot_nothing_is_acquired() -> None:
    pool = SlotPool(1, 1000, 4)
    pool.acquire(make_job(max_tokens=1), 0.0)
    assert not can_acquire(pool, make_job(max_tokens=1))
    assert not pool.could_admit(make_job(max_tokens=1))


def test_a_released_sequence_belongs_to_the_cache_with_its_cells_until_it_is_freed() -> None:
    pool = SlotPool(1, 100, 1)
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


def damaged(pool: SlotPool, slot: Slot, how: str) -> None:
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
def test_the_integrity_check_finds(how: str) -> None:
    pool = SlotPool(2, 100, 3)
    slot = pool.acquire(make_job([7] * 8, max_tokens=4), 0.0)
    pool.check_integrity()
    damaged(pool, slot, how)
    with pytest.raises(AssertionError):
        pool.check_integrity()
