"""States of other models and damaged states are refused or harmless, and no cell is lost."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.kv_memory_kinds import (
    KINDS,
    TAIL,
    MakeEngine,
    assert_as_recomputed,
    compute,
    count_free_cells,
    lengths,
    prompt,
)


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
