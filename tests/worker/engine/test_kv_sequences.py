"""Sequences that were copied, cut, or saved and loaded give the same logits as sequences that were computed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaq.common.errors import EngineError
from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions

Logits = npt.NDArray[np.float32]
MakeEngine = Callable[..., Engine]

OPTIONS = ContextOptions(n_ctx=1024, n_batch=128, n_ubatch=32, n_seq_max=4, n_threads=1, n_threads_batch=1)
NOISE = 0.02
"""Upper bound on how much the shape of a batch changes logits, as a share of their standard deviation."""
TAIL = [7, 300, 42]


@dataclass(frozen=True)
class Kind:
    """A model with memory options, and the expected `can_cut` and `can_save_parts`."""

    model: str
    kv_unified: bool = True
    swa_full: bool = True
    can_cut: bool = True

    @property
    def can_save_parts(self) -> bool:
        return self.can_cut and self.kv_unified

    @property
    def shape(self) -> tuple[str, bool]:
        """Identifies the format of a saved state. llama.cpp also loads another model's state if the format is equal."""
        model = "plain" if self.model == "grouped" else self.model
        return model, self.kv_unified or model == "recurrent"

    @property
    def options(self) -> ContextOptions:
        has_guards = self.model == "sliding" and self.can_save_parts
        n_seq_max = 7 if has_guards else 4  # three sequences for callers, their guards, and the scratch sequence
        return replace(OPTIONS, kv_unified=self.kv_unified, swa_full=self.swa_full, n_seq_max=n_seq_max)


KINDS = {
    "plain": Kind("plain"),
    "grouped": Kind("grouped"),
    "sliding": Kind("sliding"),
    "window": Kind("sliding", swa_full=False, can_cut=False),
    "recurrent": Kind("recurrent", can_cut=False),
    "hybrid": Kind("hybrid", can_cut=False),
    "plain streams": Kind("plain", kv_unified=False),
    "sliding streams": Kind("sliding", kv_unified=False),
    "window streams": Kind("sliding", kv_unified=False, swa_full=False, can_cut=False),
    "recurrent streams": Kind("recurrent", kv_unified=False, can_cut=False),
    "hybrid streams": Kind("hybrid", kv_unified=False, can_cut=False),
}
BLOCKS = [name for name, kind in KINDS.items() if kind.can_save_parts]
WHOLE = [name for name, kind in KINDS.items() if not kind.can_cut]
STREAMS = ["plain streams", "sliding streams", "window streams", "hybrid streams"]


def prompt(n: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 500, n).tolist()
    return tokens


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("memory")

    def write(name: str) -> Path:
        path = directory / f"{name}.gguf"
        return path if path.exists() else write_model(path, MEMORY_KINDS[name], seed=3)

    return write


@pytest.fixture
def make_engine(model_file: Callable[[str], Path]) -> Iterator[MakeEngine]:
    """Create engines by their names in `KINDS`, with changed options if given."""
    engines: list[Engine] = []

    def build(name: str, **changes: Any) -> Engine:
        options = replace(KINDS[name].options, **changes)
        engines.append(Engine(Model(model_file(KINDS[name].model), ModelOptions(n_gpu_layers=0)), options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def compute(engine: Engine, seq_id: int, tokens: Sequence[int]) -> Logits:
    """Decode the tokens that the sequence does not hold yet, and return the logits of the last one."""
    n_past = engine.context.last_position(seq_id) + 1
    batch = engine.context.batch
    for start in range(n_past, len(tokens), 50):
        end = min(start + 50, len(tokens))
        batch.clear()
        batch.add_chunk(tokens[start:end], start, seq_id, has_row=end == len(tokens))
        assert engine.context.decode() == 0
        engine.sequences.keep_cells(seq_id, end)
    logits: Logits = engine.context.logits(1)[0].copy()
    return logits


def fresh_logits(make_engine: MakeEngine, name: str, tokens: Sequence[int]) -> Logits:
    return compute(make_engine(name), 0, tokens)


def assert_close(logits: Logits, expected: Logits) -> None:
    assert np.abs(logits - expected).max() < NOISE * expected.std()


def assert_as_recomputed(make_engine: MakeEngine, name: str, tokens: Sequence[int], logits: Logits) -> None:
    """Compare the logits after `tokens` with those that a new engine computes."""
    assert_close(logits, fresh_logits(make_engine, name, tokens))


def lengths(engine: Engine, *seq_ids: int) -> list[int]:
    return [engine.context.last_position(seq_id) + 1 for seq_id in seq_ids]


def count_free_cells(engine: Engine) -> int:
    """Return the number of free cells, found by filling the memory."""
    batch, n = engine.context.batch, 0
    for size in (128, 64, 32, 16, 8, 4, 2, 1):
        while True:
            batch.clear()
            batch.add_chunk([1] * size, n, 0, has_row=False)
            if engine.context.decode():
                break
            n += size
    engine.sequences.remove(0)
    return n


def test_each_kind_of_memory_has_the_expected_abilities(make_engine: MakeEngine, name: str) -> None:
    kind, engine = KINDS[name], make_engine(name)
    assert (engine.sequences.can_cut, engine.sequences.can_save_parts, engine.context.kv_unified) == (
        kind.can_cut,
        kind.can_save_parts,
        kind.kv_unified,
    )
    assert engine.sequences.cells_per_sequence == (1024 if kind.kv_unified else 256)
    assert engine.sequences.n_sequences == (3 if kind.can_save_parts else 4)


# ---- copies


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


# ---- saving and loading


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


# ---- wrong data


def test_the_state_of_a_memory_of_another_shape_is_refused(make_engine: MakeEngine) -> None:
    saved = {}
    for name in KINDS:
        engine = make_engine(name)
        compute(engine, 0, prompt(60))
        saved[name] = engine.sequences.save(0, 0, 60)
    for name, kind in KINDS.items():
        engine = make_engine(name)
        compute(engine, 0, prompt(20))
        for other, data in saved.items():
            assert engine.sequences.load(1, 0, 60, data, 0) is (KINDS[other].shape == kind.shape), (name, other)
            engine.sequences.remove(1)
        assert_as_recomputed(make_engine, name, [*prompt(20), *TAIL], compute(engine, 0, [*prompt(20), *TAIL]))


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 10_000), st.none()),
    st.tuples(st.just("byte"), st.integers(0, 700), st.integers(1, 255)),
    st.tuples(st.just("int"), st.integers(0, 170), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just("noise"), st.integers(0, 300), st.none()),
)


def damaged(data: bytes, how: str, at: int, value: int | None) -> bytes:
    if how == "cut":
        return data[: at % len(data)]
    if how == "noise":
        return data[:at] + np.random.default_rng(at).bytes(len(data) - at)
    changed = bytearray(data)
    if how == "byte":
        changed[at % len(data)] ^= value or 0
    else:
        struct.pack_into("<i", changed, 4 * at % (len(data) - 4), value or 0)
    return bytes(changed)


@pytest.mark.parametrize("name", ["plain", "sliding", "window", "recurrent", "hybrid", "plain streams"])
def test_damaged_data_are_refused_or_harmless_and_no_cell_is_lost(make_engine: MakeEngine, name: str) -> None:
    engine, tokens = make_engine(name), prompt(30)
    compute(engine, 1, tokens)
    data = bytes(engine.sequences.save(1, 0, 30))
    tail = data[-4000:]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(damage=DAMAGE, from_end=st.booleans())
    def damage_and_load(damage: tuple[str, int, int | None], from_end: bool) -> None:
        bad = data[:-4000] + damaged(tail, *damage) if from_end and len(data) > 8000 else damaged(data, *damage)
        is_loaded = engine.sequences.load(2, 0, 30, bad, 0)
        assert lengths(engine, 1, 2) == [30, 30 if is_loaded else 0]
        engine.sequences.remove(2)
        assert lengths(engine, 2, 3) == [0, 0]

    damage_and_load()
    assert_as_recomputed(make_engine, name, [*tokens, *TAIL], compute(engine, 1, [*tokens, *TAIL]))
    engine.sequences.remove(1)
    if KINDS[name].kv_unified and KINDS[name].can_cut:
        assert count_free_cells(engine) == 1024


# ---- copies between streams, which the next decode executes


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
