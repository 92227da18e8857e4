"""Sequences that were saved and loaded give the same logits as sequences that were computed."""

from __future__ import annotations

import pytest
from tests.support.kv_memory_kinds import (
    BLOCKS,
    TAIL,
    WHOLE,
    MakeEngine,
    assert_as_recomputed,
    compute,
    count_free_cells,
    lengths,
    prompt,
)

from llamaq.common.errors import EngineError
from llamaq.tools.random_gguf import SLIDING


def test_a_saved_sequence_continues_in_another_engine(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 1, prompt(40, seed=5))
    compute(engine, 2, tokens)
    data = engine.sequences.save(2, 0, 150)
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, 2, [*tokens, *TAIL]))
    other = make_engine(name)
    compute(other, 0, prompt(33, seed=6))
    assert other.sequences.load(1, 0, 150, data, 0)
    assert lengths(other, 0, 1) == [33, 150]
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(other, 1, [*tokens, *TAIL]))
    assert_as_recomputed(
        make_engine, name, [*prompt(33, seed=6), *TAIL], compute(other, 0, [*prompt(33, seed=6), *TAIL])
    )


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("n", [130, 128, 101, 64, 65])
def test_blocks_are_loaded_one_by_one_and_the_last_one_partly(make_engine: MakeEngine, name: str, n: int) -> None:
    engine, tokens = make_engine(name), prompt(130)
    compute(engine, 0, tokens)
    blocks = [(start, engine.sequences.save(0, start, end)) for start, end in ((0, 64), (64, 128), (128, 130))]
    engine.sequences.remove(0)
    for start, data in blocks:
        if start < n:
            assert engine.sequences.load(1, start, min(start + 64, n), data, start)
    assert_as_recomputed(make_engine, name, [*tokens[:n], *TAIL], compute(engine, 1, [*tokens[:n], *TAIL]))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("start", "end"), [(0, 200), (0, 130), (64, 200), (70, 100), (150, 151), (100, 199)])
def test_missing_cells_are_loaded_from_the_middle_of_a_long_block(
    make_engine: MakeEngine, name: str, start: int, end: int
) -> None:
    engine, tokens = make_engine(name), prompt(200)
    compute(engine, 0, tokens)
    data = engine.sequences.save(0, 0, 200)
    if start:
        assert engine.sequences.copy(0, 1, start) == start
    engine.sequences.remove(0)
    assert engine.sequences.load(1, start, end, data, 0)
    assert_as_recomputed(make_engine, name, [*tokens[:end], *TAIL], compute(engine, 1, [*tokens[:end], *TAIL]))


@pytest.mark.parametrize("name", BLOCKS)
def test_loaded_cells_can_be_cut_copied_and_saved_at_any_token(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(200)
    compute(engine, 0, tokens)
    data = engine.sequences.save(0, 0, 200)
    engine.sequences.remove(0)
    assert engine.sequences.load(1, 0, 200, data, 0)
    assert engine.sequences.copy(1, 2, 110) == 110
    assert_as_recomputed(make_engine, name, [*tokens[:110], *TAIL], compute(engine, 2, [*tokens[:110], *TAIL]))
    again = engine.sequences.save(1, 90, 200)
    assert engine.sequences.cut(1, 90) == 90
    assert engine.sequences.load(1, 90, 180, again, 90)
    assert_as_recomputed(make_engine, name, [*tokens[:180], *TAIL], compute(engine, 1, [*tokens[:180], *TAIL]))


@pytest.mark.parametrize("name", ["plain streams", "sliding streams"])
def test_a_stream_is_saved_as_a_whole_and_loaded_partly(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(150)
    compute(engine, 0, tokens)
    data = engine.sequences.save(0, 0, 150)
    assert engine.sequences.load(1, 0, 100, data, 0) is (
        name == "plain streams"
    )  # sliding-window layers save only the last window
    assert lengths(engine, 1) == [100 if name == "plain streams" else 0]
    if lengths(engine, 1) == [100]:
        assert_as_recomputed(make_engine, name, [*tokens[:100], *TAIL], compute(engine, 1, [*tokens[:100], *TAIL]))
    with pytest.raises(EngineError, match="whole"):
        engine.sequences.save(0, 0, 100)


@pytest.mark.parametrize("name", WHOLE)
def test_a_sequence_that_cannot_be_cut_is_saved_and_loaded_only_as_a_whole(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    compute(engine, 0, prompt(150))
    data = engine.sequences.save(0, 0, 150)
    for start, end in ((0, 149), (10, 150)):
        with pytest.raises(EngineError, match="whole"):
            engine.sequences.save(0, start, end)
    assert not engine.sequences.load(1, 0, 149, data, 0)
    assert not engine.sequences.load(0, 150, 151, data, 150)
    assert lengths(engine, 0, 1) == [150, 0]


def test_a_sequence_that_lost_all_cells_outside_its_window_to_another_one_is_saved(make_engine: MakeEngine) -> None:
    engine, tokens = make_engine("window"), prompt(150)
    compute(engine, 0, tokens)
    compute(engine, 1, prompt(500, 3))
    assert engine.context.first_position(0) == 150 + 1 - SLIDING.n_swa
    data = engine.sequences.save(0, 0, 150)
    engine.sequences.remove(0)
    assert engine.sequences.load(0, 0, 150, data, 0)
    assert_as_recomputed(make_engine, "window", [*tokens, *TAIL], compute(engine, 0, [*tokens, *TAIL]))


def test_cells_that_a_sequence_does_not_hold_are_not_saved(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    compute(engine, 0, prompt(20))
    for seq_id, end in ((0, 21), (1, 5)):
        with pytest.raises(EngineError):
            engine.sequences.save(seq_id, 0, end)
    with pytest.raises(ValueError, match="there are no cells"):
        engine.sequences.save(0, 3, 3)
    assert lengths(engine, 0, 1, 3) == [20, 0, 0]


def test_cells_are_loaded_only_directly_behind_those_of_the_sequence(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(60)
    compute(engine, 0, tokens)
    data = engine.sequences.save(0, 0, 60)
    compute(engine, 1, tokens[:30])
    assert not engine.sequences.load(1, 0, 60, data, 0)
    assert not engine.sequences.load(1, 20, 60, data, 0)
    assert not engine.sequences.load(2, 30, 60, data, 0)
    assert not engine.sequences.load(2, 0, 61, data, 0)
    assert not engine.sequences.load(2, 0, 60, data, 1)
    assert lengths(engine, 0, 1, 2) == [60, 30, 0]
    assert_as_recomputed(make_engine, name, [*tokens[:30], *TAIL], compute(engine, 1, [*tokens[:30], *TAIL]))


@pytest.mark.parametrize("name", BLOCKS)
def test_without_room_a_block_is_refused_and_the_sequence_is_unchanged(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name, n_ctx=256), prompt(150)
    compute(engine, 0, tokens)
    data = engine.sequences.save(0, 0, 150)
    assert engine.sequences.copy(0, 1, 100) == 100
    engine.sequences.cut(0, 120)
    compute(engine, 2, prompt(100, seed=2))
    assert not engine.sequences.load(1, 100, 150, data, 0)
    assert lengths(engine, 0, 1, 2) == [120, 100, 100]
    engine.sequences.remove(2)
    assert_as_recomputed(make_engine, name, [*tokens[:100], *TAIL], compute(engine, 1, [*tokens[:100], *TAIL]))
    for seq_id in (0, 1):
        engine.sequences.remove(seq_id)
    assert count_free_cells(engine) == 256


@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_saving_needs_no_free_cell_and_leaves_no_cell_used(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name, n_ctx=256), prompt(256)
    compute(engine, 0, tokens)
    blocks = [engine.sequences.save(0, start, start + 64) for start in range(0, 256, 64)]
    engine.sequences.remove(0)
    for index, data in enumerate(blocks):
        assert engine.sequences.load(1, 64 * index, 64 * index + 64, data, 64 * index)
    assert engine.sequences.save(1, 64, 128) == blocks[1]
    engine.sequences.remove(1)
    assert count_free_cells(engine) == 256
