from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.worker.process.test_cache_fingerprint import ROPE

from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.engine.scaled_file import ScaledFile
from llamaq.worker.metadata_override import MetadataOverride
from llamaq.worker.process.engine_options import rope_options
from llamaq.worker.process.model_fingerprint import fingerprint_model
from llamaq.worker.settings import WorkerSettings


def test_models_with_other_weights_have_other_fingerprints(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{seed}-{copy}.gguf", PLAIN, seed=seed) for seed in (1, 2) for copy in (0, 1)]
    first, same, other, _ = (fingerprint_model(path, ModelOptions()) for path in paths)
    assert first == same
    assert first != other


def test_adapters_control_vectors_and_their_scales_count(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", PLAIN)
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    first.write_bytes(b"changes")
    second.write_bytes(b"Changes")
    files = [(ScaledFile(path, scale),) for path in (first, second) for scale in (1, 0.5)]
    options = [
        ModelOptions(),
        *(ModelOptions(lora=each) for each in files),
        *(ModelOptions(control_vectors=each) for each in files),
        *(ModelOptions(control_vectors=files[0], control_vector_layers=layers) for layers in ((1, 2), (1, 3))),
    ]
    assert len({fingerprint_model(model, each) for each in options}) == len(options)


def test_overridden_metadata_count(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", PLAIN)
    lists = [(), *((MetadataOverride("key", value),) for value in (1, 2, "1", 1.0))]
    assert len({fingerprint_model(model, ModelOptions(override_kv=overrides)) for overrides in lists}) == len(lists)


def test_all_files_of_a_split_model_count(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model-{number:05}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"metadata")
    found = []
    for weights in (b"weights", b"Weights", b"weights"):
        second.write_bytes(weights)
        found.append(fingerprint_model(first, ModelOptions()))
    assert found[0] == found[2] != found[1]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The path of a file that stands for a model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def fingerprint_with(path: Path, chat_template: str | None = None, **values: Any) -> str:
    """Return the fingerprint of a worker with these settings."""
    return fingerprint_model(path, ModelOptions(), rope_options(WorkerSettings(**values)), chat_template)


def test_each_setting_of_rope_and_the_chat_template_count(weights: Path) -> None:
    values = [{}, *ROPE, *({"chat_template": template} for template in ("", "a", "b"))]
    found = [fingerprint_with(weights, **each) for each in values]
    assert [each for each, one in zip(values, found, strict=True) if found.count(one) > 1] == []
    assert found == [fingerprint_with(weights, **each) for each in values]


def test_settings_of_rope_with_the_same_effect_have_the_same_fingerprint(weights: Path) -> None:
    assert fingerprint_with(weights, rope_scale=4) == fingerprint_with(weights, rope_freq_scale=0.25)
    assert fingerprint_with(weights, rope_freq_base=0, yarn_ext_factor=-1) == fingerprint_with(weights)


def test_settings_that_change_no_tokens_do_not_split_a_fleet(weights: Path) -> None:
    values: list[dict[str, Any]] = [
        {"n_threads": 2, "n_batch": 64, "n_ubatch": 32, "n_ctx": 1024, "n_parallel": 2, "chunk_size": 8},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on", "kv_unified": False, "swa_full": False},
        {"temperature": 0.1, "speculation": "ngram", "cache_salt": "salt"},
    ]
    assert {fingerprint_with(weights, **each) for each in values} == {fingerprint_with(weights)}


def test_with_default_settings_the_fingerprint_is_that_of_earlier_versions(weights: Path, tmp_path: Path) -> None:
    """Otherwise an update would split each fleet: jobs of the old workers would wait for another old worker."""
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"changes")
    assert fingerprint_with(weights) == "980e71e3f57834cb24cbf5811b8b9d6d"
    with_adapter = ModelOptions(lora=(ScaledFile(adapter, 0.5),))
    assert fingerprint_model(weights, with_adapter) == "56929e44a274810f4acca1080fa9b68e"
