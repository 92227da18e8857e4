from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.common.errors import InvalidSettings
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.draft import Draft
from llamaq.worker.core.draft_plan import DraftPart, DraftPlan
from llamaq.worker.core.slot import Slot, SlotState
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.plugins import BUILT_IN, load_strategy
from llamaq.worker.scheduling.strategies import guarded_strategy
from llamaq.worker.scheduling.strategies.batch_strategies import (
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    PrefillPriority,
    equal_shares,
    prefill_chunks,
)
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.scheduling.strategies.latency_target import LatencyTarget
from llamaq.worker.scheduling.strategies.plan_rules import PlanFault, check_plan
from llamaq.worker.testing import make_job

LIMITS = TickLimits(budget=10, chunk_size=8)


def slots_of(*work: int, idle: int = 1, bulk: Sequence[int] = ()) -> tuple[Slot, ...]:
    """Return one slot for each number, then `idle` idle slots.

    For 0 the slot is in DECODE, for any other number it is in PREFILL with this number of pending tokens. `bulk` are
    the indexes of the slots with bulk jobs.
    """
    pool = SlotPool(len(work) + idle, 10**9, len(work) + idle)
    for at, pending in enumerate(work):
        priority = "bulk" if at in bulk else "interactive"
        slot = pool.acquire(make_job([7] * (pending or 4), max_tokens=100, priority=priority), float(at))
        if pending == 0:
            slot.active.n_past = 4
            slot.active.tokens.append(1)
            slot.transition_to(SlotState.DECODE)
    return pool.slots


def planned(
    strategy: BatchStrategy, slots: Sequence[Slot], budget: int, chunk_size: int
) -> tuple[list[int], dict[int, int]]:
    """Return the indexes of the slots that decode, and the prefill chunk sizes by slot index."""
    batch = strategy.build_batch(slots, budget, chunk_size, queue_depth=0)
    return [part.slot.index for part in batch.decode], {chunk.slot.index: chunk.n_tokens for chunk in batch.prefill}


# ---- the built-in strategies


def test_decode_maximal_gives_every_stream_its_token_and_prompts_the_rest_of_one_chunk() -> None:
    assert planned(DecodeMaximal(), slots_of(0, 1000, 0, 1000), 512, 64) == ([0, 2], {1: 31, 3: 31})
    assert planned(DecodeMaximal(), slots_of(0, 1000, 0, 1000), 40, 64) == ([0, 2], {1: 19, 3: 19})


@pytest.mark.parametrize(("n_streams", "n_prompt"), [(1, 4), (2, 3), (3, 3), (9, 3)])
def test_decode_maximal_leaves_half_a_chunk_to_prompts(n_streams: int, n_prompt: int) -> None:
    slots = slots_of(*[0] * n_streams, 1000)
    assert planned(DecodeMaximal(), slots, 512, 5) == ([*range(n_streams)], {n_streams: n_prompt})
    assert planned(DecodeMaximal(), slots, 512, 1) == ([*range(n_streams)], {n_streams: 1})


def test_decode_maximal_fills_the_budget_with_prompts_while_no_stream_runs() -> None:
    assert planned(DecodeMaximal(), slots_of(1000, 1000, 1000), 512, 128) == ([], {0: 128, 1: 128, 2: 128})
    assert planned(DecodeMaximal(), slots_of(1000, 1000, 1000), 200, 128) == ([], {0: 67, 1: 67, 2: 66})


def test_prefill_priority_gives_streams_the_rest_of_the_budget() -> None:
    assert planned(PrefillPriority(), slots_of(0, 50, 0, 49), 100, 64) == ([0], {1: 50, 3: 49})
    assert planned(PrefillPriority(), slots_of(0, 50, 0, 50), 100, 64) == ([], {1: 50, 3: 50})
    assert planned(PrefillPriority(), slots_of(0, 0), 100, 64) == ([0, 1], {})


def test_balanced_gives_the_unused_part_of_one_half_to_the_other() -> None:
    assert planned(Balanced(), slots_of(0, 0, 0, 0, 100), 4, 64) == ([0, 1], {4: 2})
    assert planned(Balanced(), slots_of(0, 100, 100), 101, 64) == ([0], {1: 50, 2: 50})
    assert planned(Balanced(), slots_of(0, 0, 0, 1), 4, 64) == ([0, 1, 2], {3: 1})


def test_bulk_prompts_wait_for_one_tick_that_completes_the_interactive_prompts() -> None:
    strategy = DecodeMaximal()
    slots = slots_of(0, 60, 4, 3, bulk=[1])
    assert planned(strategy, slots, 512, 64) == ([0], {2: 4, 3: 3})
    assert planned(strategy, slots, 512, 64) == ([0], {1: 56, 2: 4, 3: 3}), "they never wait twice in a row"
    assert planned(strategy, slots, 512, 64) == ([0], {2: 4, 3: 3})
    assert planned(DecodeMaximal(), slots_of(0, 60, 65, bulk=[1]), 512, 64) == ([0], {1: 32, 2: 31})
    assert planned(DecodeMaximal(), slots_of(0, 60, bulk=[1]), 512, 64) == ([0], {1: 60})


def test_streams_with_the_fewest_generated_tokens_come_first_when_the_budget_is_too_small() -> None:
    slots = slots_of(0, 0, 0)
    slots[0].active.tokens.insert(0, 7)
    slots[0].active.n_past += 1
    assert planned(DecodeMaximal(), slots, 2, 8) == ([1, 2], {})


@pytest.mark.parametrize(
    ("pending", "limit", "shares"),
    [
        ((1000, 20), 512, {0: 492, 1: 20}),  # the short prompt is prefilled in one tick
        ((1000, 1000), 512, {0: 256, 1: 256}),
        ((1000, 1000), 511, {0: 256, 1: 255}),  # the slot admitted first gets the extra token
        ((10, 20, 30), 512, {0: 10, 1: 20, 2: 30}),
        ((5, 5, 5), 2, {0: 1, 1: 1}),
        ((1000, 5, 1, 1), 2, {0: 1, 2: 1}),  # the oldest prompt, and the shortest one
        ((1000, 600, 800), 512, {0: 171, 1: 171, 2: 170}),
        ((1000, 3, 800, 600), 514, {0: 171, 1: 3, 2: 170, 3: 170}),
        ((5, 5), 0, {}),
    ],
)
def test_prompts_share_equally_and_the_part_that_one_does_not_need_goes_to_the_others(
    pending: tuple[int, ...], limit: int, shares: dict[int, int]
) -> None:
    chunks = prefill_chunks(slots_of(*pending), limit, 512)
    assert {chunk.slot.index: chunk.n_tokens for chunk in chunks} == shares


def test_a_long_prompt_ends_while_more_short_prompts_come_than_a_tick_can_compute() -> None:
    slots = list(slots_of(100, 4, 4))
    for number in range(100):
        for chunk in prefill_chunks(slots, 2, 512):
            chunk.slot.active.n_past += chunk.n_tokens
        waiting = [slot for slot in slots if slot.n_pending]
        if slots[0] not in waiting:
            return
        new = slots_of(4)[0]
        new.active.admitted_s = 10.0 + number
        slots = [*waiting, new]
    pytest.fail("the long prompt is not computed")


def test_with_fewer_tokens_than_prompts_interactive_prompts_come_before_bulk_prompts() -> None:
    chunks = prefill_chunks(slots_of(100, 10, 20, bulk=[0, 1]), 2, 512)
    assert [(chunk.slot.index, chunk.n_tokens) for chunk in chunks] == [(0, 1), (2, 1)]


@given(needs=st.lists(st.integers(1, 300), min_size=1, max_size=8), limit=st.integers(0, 1000))
def test_shares_differ_by_at_most_one_token_unless_a_slot_needs_less(needs: list[int], limit: int) -> None:
    slots = slots_of(*needs)[:-1]
    shares = list(equal_shares(dict(zip(slots, needs, strict=True)), limit).values())
    assert sum(shares) == min(limit, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    unmet = [share for share, need in zip(shares, needs, strict=True) if share < need]
    if unmet:
        assert max(shares) <= min(unmet) + 1
        assert unmet == sorted(unmet, reverse=True), "the first slots get the remainder"


def test_the_slot_admitted_first_is_served_first_even_with_a_higher_index() -> None:
    slots = slots_of(9, 9)
    slots[0].active.admitted_s = 99.0
    assert [(chunk.slot.index, chunk.n_tokens) for chunk in prefill_chunks(slots, 1, 8)] == [(1, 1)]


work = st.lists(st.just(0) | st.integers(1, 300), min_size=1, max_size=8)
"""Numbers of prompt tokens that are left to compute. A slot with 0 decodes."""


@given(work=work, chunk_size=st.integers(1, 256), spare=st.integers(0, 600), name=st.sampled_from(sorted(BUILT_IN)))
def test_built_in_strategies_obey_the_rules(work: list[int], chunk_size: int, spare: int, name: str) -> None:
    slots = slots_of(*work)
    budget = len(slots) + spare
    batch = BUILT_IN[name]().build_batch(slots, budget, chunk_size, queue_depth=0)
    assert check_plan(batch, slots, budget) is None
    assert all(chunk.n_tokens <= chunk_size for chunk in batch.prefill)
    # The batch is as large as the strategy allows: the budget is used up, or every slot has its largest allowed part.
    n_decoding = work.count(0)
    if name == "decode-maximal":
        assert batch.n_decode == n_decoding
        assert batch.n_prefill <= chunk_size or not n_decoding
    elif name == "latency-target" and n_decoding:
        assert batch.n_decode == n_decoding
        assert batch.n_prefill == 0, "the first tick measures the streams alone"
    else:
        wanted = n_decoding + sum(min(pending, chunk_size) for pending in work)
        assert batch.n_tokens == min(budget, wanted)


# ---- the check of a plan


def batch_of(slots: Sequence[Slot], kind: str) -> object:
    decoding, prefilling, idle = slots
    match kind:
        case "over budget":
            return Batch((DecodeToken(decoding),), (PrefillChunk(prefilling, 10),))
        case "twice":
            return Batch((DecodeToken(decoding), DecodeToken(decoding)))
        case "twice in prefill":
            return Batch((), (PrefillChunk(prefilling, 1), PrefillChunk(prefilling, 1)))
        case "idle":
            return Batch((DecodeToken(idle),))
        case "idle chunk":
            return Batch((), (PrefillChunk(idle, 1),))
        case "too long":
            return Batch((), (PrefillChunk(prefilling, 21),))
        case "empty chunk":
            return Batch((), (PrefillChunk(prefilling, 0),))
        case "negative chunk":
            return Batch((), (PrefillChunk(prefilling, -5),))
        case "decode in prefill":
            return Batch((DecodeToken(prefilling),))
        case "chunk in decode":
            return Batch((), (PrefillChunk(decoding, 1),))
        case "nothing":
            return Batch()
        case "draft":
            return Batch((DecodeToken(decoding, Draft((1, 2))),))
        case "draft plan":
            return Batch((DecodeToken(decoding),), draft_plan=DraftPlan((DraftPart(decoding, 0, 1, 4),)))
        case "stranger":
            return Batch((DecodeToken(slots_of(0)[0]),))
        case "no slot":
            return Batch((DecodeToken(0),))  # type: ignore[arg-type]
        case "none":
            return None
        case "lists":
            return Batch([DecodeToken(decoding)], [])  # type: ignore[arg-type]
        case "mixed up":
            return Batch((PrefillChunk(prefilling, 1),))  # type: ignore[arg-type]
        case "fraction":
            return Batch((), (PrefillChunk(prefilling, 2.0),))  # type: ignore[arg-type]
    raise LookupError(kind)


FAULTS = {
    "over budget": PlanFault.OVER_BUDGET,
    "twice": PlanFault.SLOT_TWICE,
    "twice in prefill": PlanFault.SLOT_TWICE,
    "idle": PlanFault.IDLE_SLOT,
    "idle chunk": PlanFault.IDLE_SLOT,
    "too long": PlanFault.BAD_CHUNK,
    "empty chunk": PlanFault.BAD_CHUNK,
    "negative chunk": PlanFault.BAD_CHUNK,
    "decode in prefill": PlanFault.DECODE_IN_PREFILL,
    "chunk in decode": PlanFault.CHUNK_IN_DECODE,
    "nothing": PlanFault.NOTHING,
    "draft": PlanFault.DRAFT,
    "draft plan": PlanFault.DRAFT,
    "stranger": PlanFault.UNKNOWN_SLOT,
    "no slot": PlanFault.UNKNOWN_SLOT,
    "none": PlanFault.NOT_A_BATCH,
    "lists": PlanFault.NOT_A_BATCH,
    "mixed up": PlanFault.NOT_A_BATCH,
    "fraction": PlanFault.NOT_A_BATCH,
}


class Custom:
    """A user's strategy that calls one function."""

    def __init__(self, build: Callable[[Sequence[Slot]], object]) -> None:
        self.build = build
        self.seen: list[tuple[int, int, int, int]] = []

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        self.seen.append((len(slots), budget, chunk_size, queue_depth))
        return self.build(slots)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.interpreted if kind == "lists" else ()) for kind in FAULTS],
)  # a compiled `Batch` refuses lists itself
def test_a_faulty_batch_is_logged_once_and_decode_maximal_plans_the_tick(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    slots = slots_of(0, 20)
    guarded = GuardedStrategy(Custom(lambda slots: batch_of(slots, kind)), LIMITS)
    assert check_plan(batch_of(slots, kind), slots, 10) is FAULTS[kind]  # type: ignore[arg-type]
    for _ in range(3):
        assert guarded.plan(slots, 0) == DecodeMaximal().build_batch(slots, 10, 8, queue_depth=0)
    assert guarded.faults == {FAULTS[kind]: 3}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert FAULTS[kind].name in record.getMessage()


def test_the_cases_above_cover_every_fault_of_a_batch() -> None:
    covered_below = {PlanFault.RAISED, PlanFault.CHANGED_SLOTS, PlanFault.WAITING_SLOT}
    assert set(FAULTS.values()) == set(PlanFault) - covered_below


@pytest.mark.parametrize("state", [SlotState.FOLLOW, SlotState.LOAD])
def test_a_slot_that_waits_for_cells_gets_no_part(state: SlotState) -> None:
    decoding, waiting, _ = slots = slots_of(0, 20)
    waiting.transition_to(state)
    assert check_plan(Batch((DecodeToken(decoding),), (PrefillChunk(waiting, 1),)), slots, 10) is PlanFault.WAITING_SLOT
    for kind in BUILT_IN.values():
        batch = kind().build_batch(slots, 10, 8, queue_depth=0)
        assert check_plan(batch, slots, 10) is None
        assert waiting not in [part.slot for part in batch.parts]
    assert check_plan(Batch(), [waiting], 10) is None


def test_a_chunk_ends_at_the_next_checkpoint() -> None:
    slots = slots_of(20, idle=0)
    slots[0].active.checkpoints = [3, 5, 30]
    guarded = GuardedStrategy(DecodeMaximal(), LIMITS)
    for n_past, n_tokens in ((0, 3), (3, 2), (5, 8), (18, 2)):
        slots[0].active.n_past = n_past
        assert guarded.plan(slots, 0).n_tokens == n_tokens


def test_only_the_plans_of_built_in_strategies_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Derived(DecodeMaximal):
        """A strategy of a user."""

    checked: list[Batch] = []
    monkeypatch.setattr(guarded_strategy, "check_plan", lambda batch, *_: checked.append(batch))
    slots = slots_of(0, 20)
    for strategy in (DecodeMaximal(), PrefillPriority(), Balanced(), LatencyTarget()):
        assert GuardedStrategy(strategy, LIMITS).plan(slots, 0)
    assert not checked
    assert [GuardedStrategy(Derived(), LIMITS).plan(slots, 0)] == checked


def test_a_strategy_that_raises_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    slots = slots_of(0, 20)
    guarded = GuardedStrategy(Custom(lambda slots: 1 // 0), LIMITS)
    assert guarded.plan(slots, 0).n_tokens == 8
    assert guarded.plan(slots, 0).n_tokens == 8
    assert guarded.faults == {PlanFault.RAISED: 2}
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "ZeroDivisionError" in caplog.text


def change_state(slot: Slot) -> None:
    slot.transition_to(SlotState.PREFILL)


def change_run(slot: Slot) -> None:
    slot.run = None
    slot.state = SlotState.IDLE


def change_progress(slot: Slot) -> None:
    slot.active.n_past += 1


def change_history(slot: Slot) -> None:
    slot.active.tokens.append(9)


@pytest.mark.parametrize("change", [change_state, change_run, change_progress, change_history])
def test_changes_of_slots_by_a_strategy_are_undone(change: Callable[[Slot], None]) -> None:
    slots = slots_of(0, 0, 20)
    before = [(slot.state, slot.run, slot.n_pending, list(slot.active.tokens)) for slot in slots[:3]]

    def build(slots: Sequence[Slot]) -> Batch:
        batch = DecodeMaximal().build_batch(slots, 10, 8, queue_depth=0)
        change(slots[0])
        change(slots[1])
        return batch

    guarded = GuardedStrategy(Custom(build), LIMITS)
    guarded.plan(slots, 0)
    assert [(slot.state, slot.run, slot.n_pending, slot.active.tokens) for slot in slots[:3]] == before
    assert guarded.faults == {PlanFault.CHANGED_SLOTS: 1}


def test_a_strategy_cannot_remove_slots_from_the_worker() -> None:
    slots = slots_of(0, 20)
    guarded = GuardedStrategy(Custom(lambda slots: slots.clear()), LIMITS)  # type: ignore[attr-defined]
    guarded.plan(slots, 0)
    assert guarded.faults == {PlanFault.RAISED: 1}


def test_a_custom_strategy_gets_slots_budget_chunk_size_and_queue_depth_and_its_batch_is_used() -> None:
    slots = slots_of(0, 20)
    strategy = Custom(lambda slots: Batch((), (PrefillChunk(slots[1], 3),)))
    guarded = GuardedStrategy(strategy, LIMITS)
    assert guarded.plan(slots, 77) == Batch((), (PrefillChunk(slots[1], 3),))
    assert strategy.seen == [(3, 10, 8, 77)]
    assert not guarded.faults


# ---- loading by name


@pytest.mark.parametrize("name", ["decode-maximal", "prefill-priority", "balanced", "latency-target"])
def test_built_in_strategies_are_loaded_by_their_names(name: str) -> None:
    assert type(load_strategy(name)) is BUILT_IN[name]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_strategies.py").write_text(
        "from llamaq.worker import DecodeMaximal, PrefillPriority\n"
        "class ByDepth:\n"
        "    def build_batch(self, slots, budget, chunk_size, *, queue_depth):\n"
        "        inner = PrefillPriority() if queue_depth > 8 else DecodeMaximal()\n"
        "        return inner.build_batch(slots, budget, chunk_size, queue_depth=queue_depth)\n"
        "class NoMethod: ...\n"
        "class Picky:\n"
        "    def __init__(self, level): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_strategies", raising=False)
    return "my_strategies"


def test_a_users_strategy_is_loaded_and_may_call_the_built_in_ones(user_module: str) -> None:
    guarded = GuardedStrategy(load_strategy(f"{user_module}:ByDepth"), TickLimits(budget=100, chunk_size=64))
    slots = slots_of(0, 50, 50)
    assert guarded.plan(slots, 8).n_decode == 1
    assert guarded.plan(slots, 9).n_decode == 0
    assert not guarded.faults


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("decode-minimal", "give one of decode-maximal, prefill-priority, balanced, latency-target, or module:Class"),
        ("", "give one of"),
        (":Class", "is not of the form module:attribute"),
        ("my_strategies:", "is not of the form module:attribute"),
        ("no_such_module_anywhere:Class", "ModuleNotFoundError"),
        ("my_strategies:Nobody", "AttributeError"),
        ("my_strategies:NoMethod", "it has no method build_batch"),
        ("my_strategies:Picky", "TypeError"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_a_strategy_that_cannot_be_loaded_names_the_flag(name: str, why: str) -> None:
    with pytest.raises(InvalidSettings, match="--batch-strategy") as caught:
        load_strategy(name)
    assert "LLAMAQ_BATCH_STRATEGY" in str(caught.value)
    assert repr(name) in str(caught.value)
    assert why in str(caught.value)
