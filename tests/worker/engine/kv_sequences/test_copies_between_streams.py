"""Copies between streams, which the next decode executes, can be used before it."""

from __future__ import annotations

import pytest
from tests.support.kv_memory_kinds import (
    BLOCKS,
    STREAMS,
    TAIL,
    MakeEngine,
    assert_as_recomputed,
    compute,
    lengths,
    prompt,
)

from llamaq.common.errors import EngineError


@pytest.mark.parametrize("name", STREAMS)
def test_the_source_of_a_copy_may_be_loaded_immediately(make_engine: MakeEngine, name: str) -> None:
    engine, tokens, others = make_engine(name), prompt(150), prompt(80, seed=2)
    compute(engine, 1, others)
    data = engine.sequences.save(1, 0, 80)
    compute(engine, 0, tokens)
    assert engine.sequences.copy(0, 2, 150) == 150
    engine.sequences.remove(0)
    assert engine.sequences.load(0, 0, 80, data, 0)
    for seq_id, history in ((0, others), (1, others), (2, tokens)):
        assert_as_recomputed(make_engine, name, [*history, *TAIL], compute(engine, seq_id, [*history, *TAIL]))


@pytest.mark.parametrize("name", STREAMS)
def test_the_target_of_a_copy_may_be_removed_and_loaded_immediately(make_engine: MakeEngine, name: str) -> None:
    engine, tokens, others = make_engine(name), prompt(150), prompt(80, seed=2)
    compute(engine, 1, others)
    data = engine.sequences.save(1, 0, 80)
    compute(engine, 0, tokens)
    assert engine.sequences.copy(0, 2, 150) == 150
    engine.sequences.remove(2)
    assert engine.sequences.load(2, 0, 80, data, 0)
    for seq_id, history in ((0, tokens), (1, others), (2, others)):
        assert_as_recomputed(make_engine, name, [*history, *TAIL], compute(engine, seq_id, [*history, *TAIL]))


@pytest.mark.parametrize("name", BLOCKS)
def test_cells_that_left_the_window_stay_while_other_sequences_are_computed(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(250)
    compute(engine, 1, prompt(100, 2))
    compute(engine, 0, tokens)
    engine.sequences.remove(1)
    compute(
        engine, 1, prompt(500, 3)
    )  # fills the free cells before those of the sequence, and then continues after them
    engine.sequences.remove(1)
    assert engine.sequences.copy(0, 1, 150) == 150
    data = engine.sequences.save(0, 0, 250)
    engine.sequences.remove(0)
    assert engine.sequences.load(2, 0, 250, data, 0)
    for seq_id, n_tokens in ((1, 150), (2, 250)):
        history = [*tokens[:n_tokens], *TAIL]
        assert_as_recomputed(make_engine, name, history, compute(engine, seq_id, history))


def test_a_copy_may_be_saved_immediately(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 0, tokens)
    assert engine.sequences.copy(0, 1, 150) == 150
    data = engine.sequences.save(1, 0, 150)
    assert lengths(engine, 0, 1, 2) == [150, 150, 0]
    assert engine.sequences.load(2, 0, 150, data, 0)
    for seq_id in (0, 1, 2):
        assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, seq_id, [*tokens, *TAIL]))


@pytest.mark.parametrize("name", STREAMS)
def test_saving_the_source_of_a_copy_needs_no_decode(
    make_engine: MakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 0, tokens)
    expected = engine.sequences.save(0, 0, 150)
    assert engine.sequences.copy(0, 1, 150) == 150
    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "decode", lambda: pytest.fail("a token was computed"))
        assert engine.sequences.save(0, 0, 150) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_a_copy_is_saved_from_its_original_without_a_decode_and_without_an_empty_sequence(
    make_engine: MakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = make_engine(name), prompt(150)
    for seq_id in (0, 3):
        compute(engine, seq_id, tokens)
    assert engine.sequences.copy(0, 1, 150) == 150
    assert engine.sequences.copy(1, 2, 150) == 150
    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "decode", lambda: pytest.fail("a token was computed"))
        saved = [engine.sequences.save(seq_id, 0, 150) for seq_id in (1, 2)]
    engine.sequences.remove(3)
    for data in saved:
        assert engine.sequences.load(3, 0, 150, data, 0)
        assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, 3, [*tokens, *TAIL]))
        engine.sequences.remove(3)


@pytest.mark.parametrize("name", STREAMS)
def test_a_copy_is_saved_although_its_original_was_removed_and_replaced(make_engine: MakeEngine, name: str) -> None:
    engine, tokens, others = make_engine(name), prompt(150), prompt(150, seed=2)
    compute(engine, 0, tokens)
    compute(engine, 2, others)
    assert engine.sequences.copy(0, 1, 150) == 150
    engine.sequences.remove(0)
    assert engine.sequences.copy(2, 0, 150) == 150
    data = engine.sequences.save(1, 0, 150)
    assert engine.sequences.load(3, 0, 150, data, 0)
    for seq_id, history in ((0, others), (1, tokens), (3, tokens)):
        assert_as_recomputed(make_engine, name, [*history, *TAIL], compute(engine, seq_id, [*history, *TAIL]))


@pytest.mark.parametrize("name", ["plain streams", "sliding streams"])
def test_a_part_of_a_sequence_that_was_copied_is_saved(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 0, tokens)
    assert engine.sequences.copy(0, 1, 100) == 100
    with pytest.raises(EngineError, match="whole"):
        engine.sequences.save(1, 0, 150)
    assert engine.sequences.copy(0, 2, 100) == 100
    data = engine.sequences.save(2, 0, 100)
    assert engine.sequences.load(3, 0, 100, data, 0)
    assert_as_recomputed(make_engine, name, [*tokens[:100], *TAIL], compute(engine, 3, [*tokens[:100], *TAIL]))


def test_without_an_empty_sequence_a_copy_whose_original_was_replaced_is_saved_only_after_the_next_batch(
    make_engine: MakeEngine,
) -> None:
    engine, tokens = make_engine("hybrid streams"), prompt(50)
    for seq_id in (0, 2, 3):
        compute(engine, seq_id, tokens)
    assert engine.sequences.copy(0, 1, 50) == 50
    engine.sequences.remove(0)
    assert engine.sequences.copy(2, 0, 50) == 50
    with pytest.raises(EngineError, match="before the next batch"):
        engine.sequences.save(1, 0, 50)
    compute(engine, 3, [*tokens, 1])
    assert engine.sequences.save(1, 0, 50)
