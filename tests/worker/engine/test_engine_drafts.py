"""Drafts and forced tokens change no token that `Engine` generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.engine_ticks import (
    OPTIONS,
    assert_equal_output,
    generate_alone,
    generated,
    prefill_slot,
    prompt,
    run_tick,
)

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.draft import Draft
from llamaq.worker.core.slot import Slot, SlotState
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import NO_ROOM, Model
from llamaq.worker.engine.load_options import ModelOptions


def decode_with_draft(engine: Engine, slot: Slot, draft: Sequence[int], *others: PrefillChunk) -> int:
    """Run one tick as the scheduler does. Returns the number of accepted draft tokens."""
    run = slot.active
    n_before = len(run.tokens)
    results = engine.run(Batch((DecodeToken(slot, Draft(tuple(draft))),), others))
    for result in results:
        if result.slot is not slot:
            result.slot.active.n_past = result.n_past
            continue
        assert len(run.tokens) == n_before, "the engine leaves the history as it was"
        tokens = [sampled.token for sampled in result.sampled]
        assert tokens[:-1] == list(draft[: len(tokens) - 1])
        run.tokens += tokens
        run.n_past = n_before + len(tokens) - 1
        if result.n_past > n_before:
            assert result.n_past == n_before + len(draft)
            assert engine.sequences.cut(run.seq_id, run.n_past) == run.n_past
        assert engine.sequences.holds(run.seq_id, run.n_past)
    return len(run.tokens) - n_before - 1


def test_a_draft_changes_no_token_and_leaves_no_cell_beside_a_prompt(any_model: Path) -> None:
    options = replace(OPTIONS, n_logits=32)
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), options)
    assert engine.sequences.can_remove_draft is engine.sequences.can_cut
    if engine.sequences.can_remove_draft:
        expected = generate_alone(engine, prompt(100, seed=1), 60)
        slot, other = prefill_slot(0, prompt(100, seed=1)), prefill_slot(1, prompt(300, seed=2))
        while slot.state is not SlotState.DECODE:
            run_tick(engine, [slot])
        n_accepted: list[int] = []
        while len(generated(slot)) < 60:
            n = len(generated(slot))
            draft = generated(expected)[n : n + 6] or [1]
            if (wrong_at := (None, 3, 0)[len(n_accepted) % 3]) is not None:
                draft[wrong_at:] = [7] * len(draft[wrong_at:])
            n_accepted.append(decode_with_draft(engine, slot, draft, PrefillChunk(other, min(9, other.n_pending - 1))))
        del slot.active.tokens[160:]
        assert {0, 3, 6} <= {*n_accepted}
        assert_equal_output(slot, expected)
        for each in (slot, other):
            engine.sequences.remove(each.active.seq_id)
    engine.close()


def test_a_batch_without_room_is_computed_without_its_drafts(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [prefill_slot(index, demo.vocab.encode(text)) for index, text in enumerate(["Once upon", "The sun was"])]
    while any(slot.state is not SlotState.DECODE for slot in slots):
        run_tick(demo, slots)
    decode, statuses = demo.context.decode, [NO_ROOM]
    monkeypatch.setattr(demo.context, "decode", lambda: statuses.pop() if statuses else decode())
    before = [slot.active.n_past for slot in slots]
    results = demo.run(Batch(tuple(DecodeToken(slot, Draft((1, 2))) for slot in slots)))
    assert [result.n_past for result in results] == [n_past + 1 for n_past in before]
    assert [len(result.sampled) for result in results] == [1, 1]


def test_a_sequence_that_is_decoded_alone_needs_no_room_for_its_forced_tokens(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = prefill_slot(0, demo.vocab.encode("Once upon"))
    while slot.state is not SlotState.DECODE:
        run_tick(demo, [slot])
    n_before = slot.active.n_past
    demo.sequences.isolated[slot.active.seq_id] = slot.active
    decode, statuses = demo.context.decode, [NO_ROOM]
    monkeypatch.setattr(demo.context, "decode", lambda: statuses.pop() if statuses else decode())
    [result] = demo.run(Batch((DecodeToken(slot, forced=(1, 2, 3)),)))
    assert not result.no_room
    assert (result.n_past, len(result.sampled)) == (n_before + 1, 1)
    slot.active.n_past = result.n_past
    statuses += [NO_ROOM, NO_ROOM]
    slot.active.tokens.append(result.sampled[0].token)
    [result] = demo.run(Batch((DecodeToken(slot, forced=(1, 2, 3)),)))
    assert (result.no_room, result.n_past) == (True, n_before + 1)
    demo.sequences.remove(slot.active.seq_id)


def test_forced_tokens_are_computed_like_a_prompt_and_the_next_token_is_sampled(any_model: Path) -> None:
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    expected = generate_alone(engine, prompt(100, seed=1), 30)
    slot, other = prefill_slot(0, prompt(100, seed=1)), prefill_slot(1, prompt(300, seed=2))
    while slot.state is not SlotState.DECODE:
        run_tick(engine, [slot])
    while len(generated(slot)) < 30:
        run, n = slot.active, len(generated(slot))
        forced = tuple(generated(expected)[n : n + n % 5])
        chunk = PrefillChunk(other, min(9, other.n_pending - 1))
        results = {one.slot: one for one in engine.run(Batch((DecodeToken(slot, forced=forced),), (chunk,)))}
        result, other.active.n_past = results[slot], results[other].n_past
        assert tuple(one.token for one in result.sampled[:-1]) == forced
        assert result.n_past == run.n_past + 1 + len(forced)
        assert engine.sequences.holds(run.seq_id, result.n_past)
        run.n_past = result.n_past
        run.tokens += [one.token for one in result.sampled]
    del slot.active.tokens[130:]
    assert_equal_output(slot, expected)
    for each in (slot, other):
        engine.sequences.remove(each.active.seq_id)
    engine.close()
