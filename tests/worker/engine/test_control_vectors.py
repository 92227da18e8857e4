"""A model with a control vector computes what a model computes that adds the same directions by a bias."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.control_vector_files import Directions, draw_directions, write_biased, write_control_vector

from llamaq.common.errors import EngineError, ModelError
from llamaq.common.protocol.embedding_task import Pooling
from llamaq.tools.random_gguf import MEMORY_KINDS, PLAIN, Weights, write_model
from llamaq.tools.random_gguf.bert_model import write_bert
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import SUCCESS, Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.engine.scaled_file import ScaledFile

OPTIONS = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, n_threads_batch=1)
PROMPT = [5, 200, 31, 77, 60, 12, 9, 9, 45, 300] * 4
N_LAYERS = 4
N_TOKENS = 100
"""All models of these tests have more tokens."""
ONE_ROW = struct.Struct("<IqI")
"""Number of dimensions of a tensor in a GGUF file, length of its row, and type."""
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


def embedding_of(model: Path, *vectors: ScaledFile, pooling: Pooling | None = None) -> Logits:
    """Return the embedding of `PROMPT`. Without a pooling that of its last token, if the model's file has none."""
    loaded = Model(model, ModelOptions(n_gpu_layers=0, control_vectors=vectors, for_embeddings=True))
    context = Context(loaded, replace(OPTIONS, has_scratch_sequence=False, embeddings=True, pooling=pooling))
    context.batch.add_text([token % N_TOKENS for token in PROMPT], 0)
    assert context.decode() == SUCCESS
    of_tokens = context.pooling is Pooling.NONE
    found = np.array(context.token_embeddings(len(PROMPT))[-1] if of_tokens else context.sequence_embedding(0))
    context.close()
    loaded.close()
    return found


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
    whole = write_control_vector(tmp_path / "whole.gguf", {1: direction}).read_bytes()
    cut.write_bytes(whole[:-64])
    (huge := tmp_path / "huge.gguf").write_bytes(whole.replace(ONE_ROW.pack(1, 64, 0), ONE_ROW.pack(1, 1 << 40, 0)))
    (letters := tmp_path / "letters.gguf").write_bytes(whole.replace(b"direction.1", b"direction.\xff"))
    cases = [
        (model, r"is not a control vector: each of its tensors must be a direction\.N"),
        (write_control_vector(tmp_path / "f16.gguf", {1: direction.astype(np.float16)}), "F32"),
        (write_control_vector(tmp_path / "0.gguf", {0: direction}), "is not for this model"),
        (write_control_vector(tmp_path / "layers.gguf", {N_LAYERS: direction}), "has the layers 0 to 3"),
        (write_control_vector(tmp_path / "wide.gguf", {1: np.tile(direction, 2)}), "has 128 dimensions"),
        (write_control_vector(tmp_path / "nan.gguf", {1: direction * np.nan}), r"direction\.1 has values like NaN"),
        (write_control_vector(tmp_path / "empty.gguf", {}), "has no directions"),
        (write_control_vector(tmp_path / "name.gguf", {"direction.x": direction}), r"and direction\.x is not"),
        (write_control_vector(tmp_path / "two-rows.gguf", {1: direction.reshape(2, 32)}), "in one row"),
        (write_control_vector(tmp_path / "digit.gguf", {"direction.\N{ARABIC-INDIC DIGIT ONE}": direction}), "is not"),
        (letters, r"direction\.\N{REPLACEMENT CHARACTER} is not"),
        (huge, r"direction\.1 has 1099511627776 dimensions"),
        (cut, r"ends inside direction\.1"),
    ]
    for path, reason in cases:
        with pytest.raises(ModelError, match=f"--control-vector: .*{path.name}.*{reason}|{reason}.*{path.name}"):
            logits_of(model, ScaledFile(path))


def test_directions_outside_of_the_range_are_refused(model: Path, directions: Directions, tmp_path: Path) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", {1: directions[1], 2: directions[2]})
    with pytest.raises(
        ModelError, match=r"--control-vector-layer-range: .*vector\.gguf has no direction for a layer from 3 to 9, only"
    ):
        logits_of(model, ScaledFile(path), layers=(3, 9))


def test_directions_that_are_too_large_with_their_scale_are_refused(
    model: Path, directions: Directions, tmp_path: Path
) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", directions)
    for scale in (1e39, 2e38):
        with pytest.raises(ModelError, match="--control-vector: the directions times their scales are too large"):
            logits_of(model, ScaledFile(path, scale), ScaledFile(path, scale))


def test_a_file_that_is_not_gguf_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("no directions")
    with pytest.raises(ModelError, match=f"--control-vector: llama.cpp cannot read {path}"):
        logits_of(model, ScaledFile(path))


# ---- architectures for which llama.cpp does not use control vectors


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_each_kind_of_model_uses_the_vector(kind: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", MEMORY_KINDS[kind])
    path = write_control_vector(tmp_path / "vector.gguf", draw_directions(model, 1))
    assert difference(logits_of(model, ScaledFile(path)), logits_of(model)) > 100 * ROUNDING


def test_an_architecture_that_ignores_control_vectors_is_refused(tmp_path: Path) -> None:
    model = write_bert(tmp_path / "bert.gguf")
    path = write_control_vector(tmp_path / "vector.gguf", draw_directions(model, 1))
    with pytest.raises(EngineError, match=r"llama\.cpp does not use control vectors for the architecture"):
        embedding_of(model, ScaledFile(path))
    assert np.array_equal(embedding_of(model, ScaledFile(path, 0)), embedding_of(model))


def test_a_vector_that_is_too_small_to_change_a_logit_is_accepted(
    model: Path, directions: Directions, tmp_path: Path
) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", directions)
    assert difference(logits_of(model, ScaledFile(path, 1e-30)), logits_of(model)) == 0


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN, Pooling.LAST])
def test_embeddings_are_computed_with_the_vector(
    model: Path, directions: Directions, tmp_path: Path, pooling: Pooling
) -> None:
    path = write_control_vector(tmp_path / "vector.gguf", directions)
    biased = write_biased(tmp_path / "biased.gguf", model, directions)
    found, expected = embedding_of(model, ScaledFile(path), pooling=pooling), embedding_of(biased, pooling=pooling)
    assert difference(found, expected) < ROUNDING
    assert difference(found, embedding_of(model, pooling=pooling)) > 100 * ROUNDING
