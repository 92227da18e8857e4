from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from llamaq.common.errors import EngineError
from llamaq.worker.core.batch import Batch, PrefillChunk, SlotResult
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.testing import FakeEngine, make_job


def prefill(engine: FakeEngine, seq_id: int, tokens: list[int], n_past: int = 0) -> SlotResult:
    """Prefill the tokens after the first `n_past` in one chunk."""
    slot = Slot(seq_id, SlotState.PREFILL, Run(make_job(tokens), seq_id, list(tokens), n_past=n_past))
    [result] = engine.run(Batch(prefill=(PrefillChunk(slot, len(tokens) - n_past),)))
    return result


def test_a_shared_cell_counts_once_until_no_sequence_holds_it() -> None:
    engine = FakeEngine(n_ctx=12)
    prefill(engine, 0, list(range(10)))
    for target in range(1, 9):
        assert engine.sequences.copy(0, target, 10) == 10
    assert engine.sequences.used_cells == 10
    prefill(engine, 1, [*range(10), 50], n_past=10)
    assert engine.sequences.used_cells == 11
    for seq_id in range(1, 9):
        engine.sequences.remove(seq_id)
    assert (engine.sequences.used_cells, engine.sequences.memory) == (10, {0: list(range(10))})
    assert engine.sequences.cut(0, 4) == 4
    assert engine.sequences.used_cells == 4


def test_a_part_without_enough_cells_is_an_error_or_is_reported() -> None:
    engine = FakeEngine(n_ctx=8)
    prefill(engine, 0, [1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="4 cells are needed"):
        prefill(engine, 1, [1, 2, 3, 4])
    engine = FakeEngine(n_ctx=8, reports_no_room=True)
    prefill(engine, 0, [1, 2, 3, 4, 5])
    result = prefill(engine, 1, [1, 2, 3, 4])
    assert (result.no_room, result.n_past, result.error, result.sampled) == (True, 0, None, ())
    engine.sequences.remove(0)
    assert not prefill(engine, 1, [1, 2, 3, 4]).no_room
    assert engine.computed == 9


def test_without_kv_unified_each_sequence_has_separate_cells() -> None:
    engine = FakeEngine(n_ctx=40, n_seq_max=4, kv_unified=False)
    assert (engine.sequences.cells_per_sequence, engine.sequences.n_sequences, engine.sequences.can_save_parts) == (
        10,
        4,
        False,
    )
    prefill(engine, 0, list(range(8)))
    assert engine.sequences.copy(0, 3, 5) == 5
    assert engine.sequences.used_cells == 13
    with pytest.raises(AssertionError, match="3 cells are needed"):
        prefill(engine, 0, list(range(11)), n_past=8)


def test_loaded_blocks_hold_the_tokens_that_were_saved() -> None:
    engine = FakeEngine()
    tokens = list(range(100, 120))
    prefill(engine, 0, tokens)
    blocks = [engine.sequences.save(0, start, start + 8) for start in (0, 8)]
    engine.sequences.remove(0)
    assert engine.sequences.load(1, 0, 8, blocks[0], 0)
    assert engine.sequences.load(1, 8, 11, blocks[1], 8)
    assert engine.sequences.memory == {1: tokens[:11]}
    assert engine.sequences.cut(1, 9) == 9
    assert engine.sequences.load(1, 9, 16, blocks[1], 8)
    assert prefill(engine, 1, tokens, n_past=16).sampled
    assert engine.computed == 24
    assert [call[0] for call in engine.sequences.calls] == ["save", "save", "load", "load", "load"]


def test_a_block_of_other_tokens_is_found_by_the_next_batch() -> None:
    engine = FakeEngine()
    prefill(engine, 0, [1, 2, 3, 4])
    assert engine.sequences.load(1, 0, 4, engine.sequences.save(0, 0, 4), 0)
    with pytest.raises(AssertionError, match="does not hold the tokens"):
        prefill(engine, 1, [1, 2, 9, 4, 5], n_past=4)


def test_wrong_data_and_loads_without_room_are_refused() -> None:
    engine = FakeEngine(n_ctx=16)
    prefill(engine, 0, list(range(10)))
    data = engine.sequences.save(0, 0, 10)
    for bad in (b"", b"noise" * 20, data[:-1], engine.sequences.save(0, 1, 10)):
        assert not engine.sequences.load(1, 0, 9, bad, 0)
    assert not engine.sequences.load(1, 0, 10, data, 0)
    engine.sequences.remove(0)
    assert not engine.sequences.load(1, 0, 11, data, 0)
    engine.sequences.fail_loads()
    assert [engine.sequences.load(1, 0, 10, data, 0) for _ in range(2)] == [False, True]
    assert engine.sequences.used_cells == 10


def test_a_test_can_make_saves_fail() -> None:
    engine = FakeEngine()
    prefill(engine, 0, [1, 2, 3])
    engine.sequences.fail_saves()
    with pytest.raises(EngineError):
        engine.sequences.save(0, 0, 3)
    assert engine.sequences.save(0, 0, 3)


def test_without_can_cut_only_whole_sequences_can_be_copied_saved_and_loaded() -> None:
    engine = FakeEngine(can_cut=False)
    prefill(engine, 0, [1, 2, 3])
    with pytest.raises(AssertionError, match="cannot be shared"):
        engine.sequences.copy(0, 1, 2)
    with pytest.raises(AssertionError, match="not all of"):
        engine.sequences.save(0, 0, 2)
    data = engine.sequences.save(0, 0, 3)
    with pytest.raises(AssertionError, match="only all"):
        engine.sequences.load(1, 0, 2, data, 0)
    assert engine.sequences.load(1, 0, 3, data, 0)
    assert engine.sequences.copy(0, 2, 3) == 3
    assert engine.sequences.cut(0, 2) == 0
    assert engine.sequences.memory == {1: [1, 2, 3], 2: [1, 2, 3]}


def test_calls_that_only_a_defect_makes_are_errors() -> None:
    engine = FakeEngine(n_seq_max=4)
    assert engine.sequences.n_sequences == 3
    prefill(engine, 0, [1, 2, 3])
    wrong: list[Callable[[], object]] = [
        lambda: engine.sequences.copy(0, 3, 1),
        lambda: engine.sequences.copy(0, 1, 4),
        lambda: engine.sequences.copy(0, 0, 1),
        lambda: engine.sequences.save(0, 2, 4),
        lambda: engine.sequences.save(0, 2, 2),
        lambda: engine.sequences.load(0, 2, 3, b"", 0),
        lambda: engine.sequences.load(0, 3, 4, b"", 4),
        lambda: engine.sequences.remove(-1),
    ]
    for call in wrong:
        with pytest.raises(AssertionError):
            call()


@pytest.mark.parametrize("seed", range(5))
def test_the_count_of_cells_equals_that_of_a_simple_model(seed: int) -> None:
    rng, engine = random.Random(seed), FakeEngine(n_ctx=60, n_seq_max=8)
    cells: dict[int, list[object]] = {seq_id: [] for seq_id in range(engine.sequences.n_sequences)}
    for _ in range(400):
        seq_id, other = rng.sample(range(engine.sequences.n_sequences), 2)
        n = rng.randint(0, len(cells[seq_id]))
        action = rng.choice(["append", "copy", "cut"])
        if action == "append" and engine.sequences.has_room(seq_id, 5):
            engine.sequences.append(seq_id, [1] * 5)
            cells[seq_id] += [object() for _ in range(5)]
        elif action == "copy":
            engine.sequences.remove(other)
            engine.sequences.copy(seq_id, other, n)
            cells[other] = cells[seq_id][:n]
        elif action == "cut":
            engine.sequences.cut(seq_id, n)
            del cells[seq_id][n:]
        assert engine.sequences.used_cells == len({id(cell) for held in cells.values() for cell in held}) <= 60
