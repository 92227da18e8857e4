from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.llama_samplers import random_logits

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.job_parts import BEST, RowDraw
from llamaq.worker.generation.sampling import row_draws
from llamaq.worker.generation.sampling.candidates import Logits
from llamaq.worker.generation.sampling.largest_logits import top_k_superset
from llamaq.worker.generation.sampling.row_draws import NativeDraws, NativeRowDrawer
from llamaq.worker.generation.sampling.top_k_draw import ORDER, TopKDraw

pytestmark = pytest.mark.starts_processes  # the compiler

BUILD_HOOK = Path(__file__).resolve().parents[4] / "worker" / "hatch_build.py"
SOURCE = Path(row_draws.__file__).with_name("native_row_draws.cpp")
FAST: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 3, "top_p": 1, "min_p": 0},
    {"top_k": 700, "min_keep": 9, "temperature": 1.7},
    {"top_k": 2**31 - 1, "temperature": 0.01},
    {"top_p": 0.3, "temperature": 1},
    {"min_p": 1, "min_keep": 2},
]
N_VOCAB = 9023
"""Two panels, and 831 tokens that do not fill a third one."""
PLACES = [0, 700, 4095, 4096, 8191, 9000, 9022]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeDraws:
    """The native draws, compiled as in the wheel of the compiled worker."""
    hook = load("hatch_build", BUILD_HOOK)
    module = hook.compile_module(SOURCE, tmp_path_factory.mktemp("native"))
    draws: NativeDraws = load("native_row_draws", module).draw_rows
    return draws


def load(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row_draw(params: SamplingDefaults, uniform: float, masked: tuple[int, ...] = ()) -> RowDraw:
    return TopKDraw(ORDER, params, params.temperature).row_draw(uniform, masked)


def drawn_by(native: NativeDraws, logits: Logits, draw: RowDraw) -> int | None:
    (token,) = native(logits, [draw], 1)
    return token


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
    native: NativeDraws,
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
        assert drawn_by(native, logits, row_draw(defaults, uniform)) == drawn_in_python(defaults, logits, uniform)


def test_the_native_draw_of_a_large_vocabulary_is_that_of_python(native: NativeDraws) -> None:
    params = SamplingDefaults(temperature=4, min_p=0, top_p=1)
    for n_vocab in (32_000, 128_256, 151_936, 151_999):
        logits = random_logits(n_vocab, n_vocab)
        uniforms = np.random.default_rng(n_vocab).random(20).tolist()
        drawn = [drawn_by(native, logits, row_draw(params, uniform)) for uniform in uniforms]
        assert drawn == [drawn_in_python(params, logits, uniform) for uniform in uniforms]
        assert len(set(drawn)) > 1


def rows_of(n_rows: int) -> npt.NDArray[np.float32]:
    return np.stack([random_logits(N_VOCAB, seed) for seed in range(n_rows)])


@pytest.mark.parametrize("n_threads", [1, 2, 5, 40])
def test_each_row_is_drawn_as_if_it_were_alone(native: NativeDraws, n_threads: int) -> None:
    drawer, rng, seen = NativeRowDrawer(native, n_threads), np.random.default_rng(n_threads), set()
    for n_rows in (1, 2, 3, 8, 33):
        rows = rows_of(n_rows)
        for _ in range(20):
            choices: list[RowDraw | None] = [
                BEST if one < 0.2 else None if one < 0.3 else row_draw(SamplingDefaults(temperature=3, top_p=1), one)
                for one in rng.random(n_rows).tolist()
            ]
            alone = [draw and drawn_by(native, row, draw) for row, draw in zip(rows, choices, strict=True)]
            assert drawer.draw(rows, choices) == alone
            seen.update(alone)
    assert len(seen) > 50
    assert None in seen


@given(seed=st.integers(0, 10**6), n_vocab=st.sampled_from([1, 63, 4096, 4097, 9023]), has_ties=st.booleans())
def test_the_best_token_is_the_first_one_with_the_largest_logit(
    native: NativeDraws, seed: int, n_vocab: int, has_ties: bool
) -> None:
    logits = random_logits(n_vocab, seed)
    if has_ties:
        logits = np.round(logits)
    assert drawn_by(native, logits, BEST) == logits.argmax()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("draw", [BEST, row_draw(SamplingDefaults(), 0.5)], ids=["best", "sampled"])
def test_logits_that_are_not_finite_numbers_are_refused(
    native: NativeDraws, place: int, bad: float, draw: RowDraw
) -> None:
    rows = rows_of(3)
    rows[1, place] = bad
    drawn = native(rows, [draw] * 3, 2)
    assert [token is None for token in drawn] == [False, True, False]
    assert drawn_by(native, np.full(N_VOCAB, bad, np.float32), draw) is None


@pytest.mark.parametrize("draw", [BEST, row_draw(SamplingDefaults(), 0.5)], ids=["best", "sampled"])
def test_nothing_is_drawn_if_all_logits_are_minus_infinity(native: NativeDraws, draw: RowDraw) -> None:
    assert drawn_by(native, np.full(N_VOCAB, -np.inf, np.float32), draw) is None
    assert drawn_by(native, np.zeros(0, np.float32), draw) is None
    assert native(np.zeros((0, N_VOCAB), np.float32), [], 4) == []


def test_masked_tokens_are_not_drawn(native: NativeDraws) -> None:
    params = SamplingDefaults(temperature=3, top_p=1)
    for uniform in np.random.default_rng(1).random(20).tolist():
        logits = random_logits(N_VOCAB, 4)
        masked = tuple(logits.argsort()[-5:].tolist())
        expected = logits.copy()
        expected[list(masked)] = -np.inf
        assert drawn_by(native, logits, row_draw(params, uniform, masked)) == drawn_in_python(params, expected, uniform)
        assert np.array_equal(logits, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_mask_does_not_hide_a_logit_that_is_not_a_finite_number(native: NativeDraws, bad: float) -> None:
    logits = random_logits(N_VOCAB, 4)
    logits[77] = bad
    before = logits.copy()
    assert drawn_by(native, logits, row_draw(SamplingDefaults(), 0.5, (3, 77))) is None
    assert np.array_equal(logits, before, equal_nan=True)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**40])
def test_a_mask_outside_the_vocabulary_writes_nothing(native: NativeDraws, token: int) -> None:
    logits = random_logits(N_VOCAB, 4)
    before = logits.copy()
    assert drawn_by(native, logits, row_draw(SamplingDefaults(), 0.5, (3, token))) is None
    assert np.array_equal(logits, before)


def test_wrong_arguments_are_refused(native: NativeDraws) -> None:
    logits, draw = random_logits(N_VOCAB, 4), row_draw(SamplingDefaults(), 0.5)
    wrong: Any = "no logits"
    with pytest.raises(TypeError):
        native(wrong, [draw], 1)
    with pytest.raises(TypeError, match="read-write"):
        native(np.zeros((4, 4), np.float32)[:, 1], [draw], 1)
    logits.flags.writeable = False
    with pytest.raises(TypeError, match="read-write"):
        native(logits, [draw], 1)
    logits.flags.writeable = True
    with pytest.raises(ValueError, match="k below 1"):
        native(logits, [draw._replace(k=0)], 1)
    not_draws: list[Any] = [list(draw), draw[:-1], (*draw[:5], [1], 0.5), (*draw[:5], ("x",), 0.5)]
    for wrong in not_draws:
        with pytest.raises(TypeError):
            native(logits, [wrong], 1)
