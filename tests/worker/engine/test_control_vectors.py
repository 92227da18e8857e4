"""A model with a control vector computes what a model computes that adds the same directions by a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.control_vector_files import Directions, draw_directions, write_biased, write_control_vector

from llamaq.common.errors import ModelError
from llamaq.tools.random_gguf import PLAIN, Weights, write_model
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import SUCCESS, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.engine.scaled_file import ScaledFile

OPTIONS = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, n_threads_batch=1)
PROMPT = [5, 200, 31, 77, 60, 12, 9, 9, 45, 300] * 4
N_LAYERS = 4
ROUNDING = 0.002
"""Upper bound on the difference of equal logits, as a share of their standard deviation."""

Logits = npt.NDArray[np.float32]


def logits_of(model: Path, *vectors: ScaledFile, layers: tuple[int, ...] = ()) -> Logits:
    """Return the logits after `PROMPT`, of the model with these control vectors."""
    options = ModelOptions(n_gpu_layers=0, control_vectors=vectors, control_vector_layers=layers)
    engine = Engine(Model(model, options), OPTIONS)
    engine.context.batch.add_chunk(PROMPT, 0, 0, has_row=True)
    assert engine.context.decode() == SUCCESS
    logits = np.array(engine.context.logits(1)[0])
    engine.close()
    return logits


def difference(one: Logits, other: Logits) -> float:
    return float(np.abs(one - other).max() / one.std())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(PLAIN, n_layers=N_LAYERS, n_silent_layers=0, weights=Weights.F32)
    return write_model(tmp_path_factory.mktemp("control-vectors") / "model.gguf", spec)


@pytest.fixture(scope="module")
def directions(model: Path) -> Directions:
    return draw_directions(model, *range(1, N_LAYERS))


@pytest.mark.parametrize("scales", [(1.0,), (0.25,), (-2.0,), (1.0, 0.5)])
def test_a_model_with_control_vectors_computes_as_one_with_the_same_biases(
    model: Path, directions: Directions, tmp_path: Path, scales: Sequence[float]
) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", directions)
    found = logits_of(model, *(ScaledFile(path, scale) for scale in scales))
    expected = logits_of(write_biased(tmp_path / "biased.gguf", model, directions, sum(scales)))
    assert difference(found, expected) < ROUNDING
    assert difference(found, logits_of(model)) > 100 * ROUNDING


@pytest.mark.parametrize("layers", [(1, 1), (2, 3), (1, N_LAYERS), (3, 200)])
def test_only_the_layers_of_the_range_are_changed(
    model: Path, directions: Directions, tmp_path: Path, layers: tuple[int, int]
) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", directions)
    first, last = layers
    kept = {layer: direction for layer, direction in directions.items() if first <= layer <= last}
    expected = logits_of(write_biased(tmp_path / "biased.gguf", model, kept))
    assert difference(logits_of(model, ScaledFile(path), layers=layers), expected) < ROUNDING


def test_a_layer_without_a_direction_is_not_changed(model: Path, directions: Directions, tmp_path: Path) -> None:
    one = {2: directions[2]}
    path = write_control_vector(tmp_path / "vector.gguf", one)
    expected = logits_of(write_biased(tmp_path / "biased.gguf", model, one))
    assert difference(logits_of(model, ScaledFile(path)), expected) < ROUNDING


def test_a_vector_with_scale_0_changes_nothing(model: Path, directions: Directions, tmp_path: Path) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", directions)
    assert difference(logits_of(model, ScaledFile(path, 0)), logits_of(model)) == 0


def test_a_file_that_is_no_control_vector_of_the_model_is_refused(
    model: Path, directions: Directions, tmp_path: Path
) -> None:
    direction = directions[1]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_control_vector(tmp_path / "whole.gguf", {1: direction}).read_bytes()[:-64])
    cases = [
        (model, r"is not a control vector: each of its tensors must be a direction\.N"),
        (write_control_vector(tmp_path / "f16.gguf", {1: direction.astype(np.float16)}), "F32"),
        (write_control_vector(tmp_path / "0.gguf", {0: direction}), "is not for this model"),
        (write_control_vector(tmp_path / "layers.gguf", {N_LAYERS: direction}), "has the layers 0 to 3"),
        (write_control_vector(tmp_path / "wide.gguf", {1: np.tile(direction, 2)}), "has 128 dimensions"),
        (write_control_vector(tmp_path / "nan.gguf", {1: direction * np.nan}), r"direction\.1 has values like NaN"),
        (write_control_vector(tmp_path / "empty.gguf", {}), "has no directions"),
        (write_control_vector(tmp_path / "name.gguf", {"direction.x": direction}), r"and direction\.x is not"),
        (cut, "dimensions|cannot read"),
    ]
    for path, reason in cases:
        with pytest.raises(ModelError, match=f"--control-vector: .*{path.name}.*{reason}|{reason}.*{path.name}"):
            logits_of(model, ScaledFile(path))


def test_a_file_that_is_not_gguf_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("no directions")
    with pytest.raises(ModelError, match=f"--control-vector: llama.cpp cannot read {path}"):
        logits_of(model, ScaledFile(path))
