"""Sequences that were copied or cut give the same logits as sequences that were computed."""

from __future__ import annotations

import pytest
from tests.support.engine_ticks import prefill_slot
from tests.support.kv_memory_kinds import (
    KINDS,
    TAIL,
    MakeEngine,
    assert_as_recomputed,
    assert_close,
    compute,
    count_free_cells,
    fresh_logits,
    lengths,
    prompt,
)


def test_each_kind_of_memory_has_the_expected_abilities(make_engine: MakeEngine, name: str) -> None:
    kind, engine = KINDS[name], make_engine(name)
    assert (engine.sequences.can_cut, engine.sequences.can_save_parts, engine.context.kv_unified) == (
        kind.can_cut,
        kind.can_save_parts,
        kind.kv_unified,
    )
    assert engine.sequences.cells_per_sequence == (1024 if kind.kv_unified else 256)
    assert engine.sequences.n_sequences == (3 if kind.can_save_parts else 4)


def test_a_copy_continues_like_its_source_and_both_are_independent(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 0, tokens)
    assert engine.sequences.copy(0, 1, 150) == 150
    copied = compute(engine, 1, [*tokens, *TAIL])
    other = compute(engine, 0, [*tokens, 9, 9, 9])
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], copied)
    assert_as_recomputed(make_engine, name, [*tokens, 9, 9, 9], other)


def test_the_source_of_a_copy_may_be_removed_and_used_again_immediately(make_engine: MakeEngine, name: str) -> None:
    engine, tokens, others = make_engine(name), prompt(150), prompt(90, seed=2)
    compute(engine, 0, tokens)
    assert engine.sequences.copy(0, 1, 150) == 150
    engine.sequences.remove(0)
    other = compute(engine, 0, others)
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, 1, [*tokens, *TAIL]))
    assert_as_recomputed(make_engine, name, others, other)


def test_copies_of_copies_before_the_next_batch_are_correct(make_engine: MakeEngine, name: str) -> None:
    engine, tokens, others = make_engine(name), prompt(130), prompt(70, seed=2)
    compute(engine, 0, tokens)
    compute(engine, 1, others)
    assert engine.sequences.copy(0, 2, 130) == 130
    engine.sequences.remove(0)
    assert engine.sequences.copy(1, 0, 70) == 70
    engine.sequences.remove(1)
    assert engine.sequences.copy(2, 1, 130) == 130
    for seq_id, history in ((0, others), (1, tokens), (2, tokens)):
        assert_as_recomputed(make_engine, name, [*history, *TAIL], compute(engine, seq_id, [*history, *TAIL]))


@pytest.mark.parametrize("n_tokens", [1, 64, 100, 149])
def test_a_prefix_is_copied_if_the_memory_can_be_cut(make_engine: MakeEngine, name: str, n_tokens: int) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 0, tokens)
    copied = engine.sequences.copy(0, 1, n_tokens)
    assert lengths(engine, 0, 1) == [150, copied]
    assert copied == n_tokens if KINDS[name].can_cut else copied in (0, n_tokens)
    if copied:
        assert_as_recomputed(
            make_engine, name, [*tokens[:n_tokens], *TAIL], compute(engine, 1, [*tokens[:n_tokens], *TAIL])
        )
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, 0, [*tokens, *TAIL]))


def test_more_cells_than_a_sequence_holds_are_not_copied(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    compute(engine, 0, prompt(20))
    assert [engine.sequences.copy(0, 1, 21), engine.sequences.copy(0, 1, 0), engine.sequences.copy(2, 1, 5)] == [
        0,
        0,
        0,
    ]
    assert lengths(engine, 0, 1, 2) == [20, 0, 0]


def test_copies_share_cells(make_engine: MakeEngine) -> None:
    engine, tokens = make_engine("plain", n_ctx=256, n_seq_max=8), prompt(240)
    compute(engine, 0, tokens)
    for seq_id in range(1, 7):
        assert engine.sequences.copy(0, seq_id, 240) == 240
    expected = fresh_logits(make_engine, "plain", [*tokens, *TAIL[:2]])
    for seq_id in range(7):
        assert_close(compute(engine, seq_id, [*tokens, *TAIL[:2]]), expected)
    for seq_id in range(7):
        engine.sequences.remove(seq_id)
    assert count_free_cells(engine) == 256


def test_cleared_sequences_can_be_computed_and_loaded(make_engine: MakeEngine, name: str) -> None:
    engine, tokens, others = make_engine(name), prompt(150), prompt(80, seed=2)
    compute(engine, 0, tokens)
    data = engine.sequences.save(0, 0, 150)
    assert engine.sequences.copy(0, 1, 150) == 150
    engine.sequences.isolated[0] = prefill_slot(0, tokens).active
    engine.sequences.clear()
    assert lengths(engine, 0, 1, 2) == [0, 0, 0]
    assert engine.sequences.isolated == {}
    assert engine.sequences.load(1, 0, 150, data, 0)
    other = compute(engine, 0, others)
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, 1, [*tokens, *TAIL]))
    assert_as_recomputed(make_engine, name, others, other)
