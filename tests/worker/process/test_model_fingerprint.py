from __future__ import annotations

from pathlib import Path

from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.engine.scaled_file import ScaledFile
from llamaq.worker.metadata_override import MetadataOverride
from llamaq.worker.process.model_fingerprint import fingerprint_model


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
