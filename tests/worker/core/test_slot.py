"""A slot obeys its table of transitions and shows its live state."""

from __future__ import annotations

import itertools

import pytest

from llamaq.worker.core.slot import TRANSITIONS, Slot, SlotState
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.testing import make_job


def test_a_slot_obeys_the_table_of_transitions_which_has_no_transition_to_the_same_state() -> None:
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
        "cached_tokens": 0,
        "prompt_tokens": 8,
        "prefilled_tokens": 8,
        "generated_tokens": 2,
        "max_generated_tokens": 9,
        "content_tokens": 9,
    }


def test_an_idle_slot_has_no_pending_tokens_and_no_job() -> None:
    slot = SlotPool(1, 10, 1).slots[0]
    assert (slot.n_pending, slot.priority) == (0, None)
    with pytest.raises(LookupError, match="runs no job"):
        _ = slot.active


def test_the_length_of_a_job_is_bounded_by_max_tokens_and_by_the_context_limit() -> None:
    assert make_job([7] * 10, max_tokens=1000, context_limit=64).max_length == 64
    assert make_job([7] * 10, max_tokens=4, context_limit=64).max_length == 14
    assert make_job([7] * 10, context_limit=64).max_length == 64
