from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.llama_samplers import random_logits

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling import top_k_draw
from llamaq.worker.generation.sampling.candidates import Logits
from llamaq.worker.generation.sampling.largest_logits import top_k_superset
from llamaq.worker.generation.sampling.top_k_draw import ORDER, NativeDraw, TopKDraw

pytestmark = pytest.mark.starts_processes  # the compiler

BUILD_HOOK = Path(__file__).resolve().parents[4] / "worker" / "hatch_build.py"
SOURCE = Path(top_k_draw.__file__).with_name("native_top_k_draw.cpp")
FAST: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 3, "top_p": 1, "min_p": 0},
    {"top_k": 700, "min_keep": 9, "temperature": 1.7},
    {"top_k": 2**31 - 1, "temperature": 0.01},
    {"top_p": 0.3, "temperature": 1},
    {"min_p": 1, "min_keep": 2},
]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeDraw:
    """The native draw, compiled as in the wheel of the compiled worker."""
    hook = load("hatch_build", BUILD_HOOK)
    module = hook.compile_module(SOURCE, tmp_path_factory.mktemp("native"))
    draw: NativeDraw = load("native_top_k_draw", module).draw
    return draw


def load(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn_by(native: NativeDraw, params: SamplingDefaults, logits: Logits, uniform: float) -> int | None:
    p = params
    return native(logits, p.top_k, p.top_p, p.min_p, p.min_keep, p.temperature, uniform)


def drawn_in_python(params: SamplingDefaults, logits: Logits, uniform: float) -> int | None:
    tokens, _ = top_k_superset(logits, params.top_k)
    draw = TopKDraw(ORDER, params, params.temperature)
    return draw.draw_of(logits.take(tokens), tokens, uniform) if tokens.size else None


@given(
    seed=st.integers(0, 10**6),
    params=st.sampled_from(FAST),
    n_vocab=st.sampled_from([1, 7, 60, 1000, 4095, 4096, 4097, 5003, 9000]),
    spread=st.sampled_from([0.01, 0.3, 2.5, 8]),
    has_ties=st.booleans(),
    share_masked=st.sampled_from([0, 0.5, 0.999, 1]),
)
def test_the_native_draw_is_that_of_python(
    native: NativeDraw,
    seed: int,
    params: dict[str, Any],
    n_vocab: int,
    spread: float,
    has_ties: bool,
    share_masked: float,
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(n_vocab, seed, spread)
    if has_ties:
        logits = np.round(logits)
    logits[rng.random(n_vocab) < share_masked] = -np.inf
    defaults = SamplingDefaults(**params)
    for uniform in (0.0, 1 - 2.0**-53, *rng.random(20).tolist()):
        assert drawn_by(native, defaults, logits, uniform) == drawn_in_python(defaults, logits, uniform)


def test_the_native_draw_of_a_large_vocabulary_is_that_of_python(native: NativeDraw) -> None:
    params = SamplingDefaults(temperature=4, min_p=0, top_p=1)
    for n_vocab in (32_000, 128_256, 151_936, 151_999):
        logits = random_logits(n_vocab, n_vocab)
        uniforms = np.random.default_rng(n_vocab).random(20).tolist()
        drawn = [drawn_by(native, params, logits, uniform) for uniform in uniforms]
        assert drawn == [drawn_in_python(params, logits, uniform) for uniform in uniforms]
        assert len(set(drawn)) > 1


@pytest.mark.parametrize("place", [0, 700, 4095, 4096, 8191, 9000, 9022])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_native_draw_refuses_logits_that_are_not_finite_numbers(native: NativeDraw, place: int, bad: float) -> None:
    logits, params = random_logits(9023, 1), SamplingDefaults()
    assert drawn_by(native, params, logits, 0.5) is not None
    logits[place] = bad
    assert drawn_by(native, params, logits, 0.5) is None
    assert drawn_by(native, params, np.full(9023, bad, np.float32), 0.5) is None


def test_nothing_is_drawn_from_no_logits(native: NativeDraw) -> None:
    assert drawn_by(native, SamplingDefaults(), np.zeros(0, np.float32), 0.5) is None


def test_wrong_arguments_are_refused(native: NativeDraw) -> None:
    wrong: Any = "no logits"
    with pytest.raises(TypeError):
        native(wrong, 40, 0.9, 0.1, 0, 1.0, 0.5)
    with pytest.raises(ValueError, match="contiguous"):
        native(np.zeros((4, 4), np.float32)[:, 1], 40, 0.9, 0.1, 0, 1.0, 0.5)
