"""A model with an adapter computes what a model computes that has the changes in its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.lora_files import write_lora, write_merged

from llamaq.common.errors import ModelError
from llamaq.tools.random_gguf import PLAIN, Weights, write_model
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import SUCCESS, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.engine.scaled_file import ScaledFile

OPTIONS = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, n_threads_batch=1)
PROMPT = [5, 200, 31, 77, 60, 12, 9, 9, 45, 300] * 4
ROUNDING = 0.02
"""Upper bound on the difference of equal logits, as a share of their standard deviation."""


def logits_of(
    model: Path, *lora: ScaledFile, scales: Sequence[tuple[float, ...] | None] = ()
) -> npt.NDArray[np.float32]:
    """Return the logits after `PROMPT`, of the model with these adapters, after it used them with each of `scales`."""
    engine = Engine(Model(model, ModelOptions(n_gpu_layers=0, lora=lora)), OPTIONS)
    for each in scales:
        engine.context.use_adapters(each)
        engine.warm_up()
    engine.context.batch.clear()
    engine.context.batch.add_chunk(PROMPT, 0, 0, has_row=True)
    assert engine.context.decode() == SUCCESS
    logits = np.array(engine.context.logits(1)[0])
    engine.close()
    return logits


def difference(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max() / one.std())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lora") / "model.gguf", replace(PLAIN, weights=Weights.F32))


@pytest.mark.parametrize("scales", [(1.0,), (0.5,), (-1.0,), (1.0, 0.5)])
def test_a_model_with_adapters_computes_as_one_with_the_changes_in_its_weights(
    model: Path, tmp_path: Path, scales: Sequence[float]
) -> None:
    adapters, merged = [], model
    for number, scale in enumerate(scales):
        path = write_lora(tmp_path / f"{number}.gguf", model, seed=number)
        adapters.append(ScaledFile(path, scale))
        merged = write_merged(tmp_path / f"merged-{number}.gguf", merged, path, scale)
    found = logits_of(model, *adapters)
    assert difference(found, logits_of(merged)) < ROUNDING
    assert difference(found, logits_of(model)) > 10 * ROUNDING


def test_an_adapter_with_scale_0_changes_nothing(model: Path, tmp_path: Path) -> None:
    adapter = ScaledFile(write_lora(tmp_path / "lora.gguf", model), 0)
    assert difference(logits_of(model, adapter), logits_of(model)) == 0


def test_the_scales_of_adapters_can_change_between_batches(model: Path, tmp_path: Path) -> None:
    first, second = (write_lora(tmp_path / f"{seed}.gguf", model, seed=seed) for seed in (1, 2))
    adapters = ScaledFile(first, 0.5), ScaledFile(second, 1)
    for scales in ((1.0, 0.0), (0.0, 0.25), (0.0, 0.0), (-1.0, 2.0)):
        expected = logits_of(
            model, *(ScaledFile(each.path, scale) for each, scale in zip(adapters, scales, strict=True))
        )
        assert difference(logits_of(model, *adapters, scales=[None, (2.0, 2.0), scales]), expected) == 0
        assert difference(logits_of(model, *adapters), expected) > ROUNDING
    assert difference(logits_of(model, *adapters, scales=[(1.0, 0.0), None]), logits_of(model, *adapters)) == 0


def test_a_file_that_is_no_adapter_of_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    for path in (model, write_lora(tmp_path / "other.gguf", model, architecture="gemma3")):
        with pytest.raises(ModelError, match=f"--lora: llama.cpp cannot load {path} as an adapter of this model"):
            logits_of(model, ScaledFile(path))


def test_an_adapter_for_some_tokens_only_is_refused(model: Path, tmp_path: Path) -> None:
    path = write_lora(tmp_path / "alora.gguf", model, invocation_tokens=[1, 2])
    with pytest.raises(ModelError, match=r"activated LoRA \(aLoRA\)"):
        logits_of(model, ScaledFile(path))
