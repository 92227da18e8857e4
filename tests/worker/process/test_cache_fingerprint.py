from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import RopeScalingType
from tests.support.control_vector_files import draw_directions, write_control_vector
from tests.support.lora_files import write_lora

from llamaq.tools.random_gguf import PLAIN, ModelSpec, write_model, writer
from llamaq.tools.random_gguf.tensors import Tensor, Values, model_tensors
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.metadata_override import MetadataOverride
from llamaq.worker.model_settings import RopeSettings
from llamaq.worker.process.cache_fingerprint import _file_hash, _has_long_context, fingerprint
from llamaq.worker.process.generation_parts import load_engine
from llamaq.worker.settings import WorkerSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_the_hash_of_a_file_is_stored_and_used_until_the_file_changes(model: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    first = _file_hash(model, cache_dir)
    assert first == _file_hash(model, None)
    (stored,) = (path for path in cache_dir.rglob("*.json"))
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "hash": "from the file"}))
    assert _file_hash(model, cache_dir) == "from the file"
    model.write_bytes(b"other weights")
    assert _file_hash(model, cache_dir) == _file_hash(model, None) != first


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"identity": 1}'])
def test_a_damaged_hash_file_is_replaced(model: Path, tmp_path: Path, damaged: str) -> None:
    cache_dir = tmp_path / "cache"
    expected = _file_hash(model, cache_dir)
    (stored,) = (path for path in cache_dir.rglob("*.json"))
    stored.write_text(damaged)
    assert _file_hash(model, cache_dir) == expected
    assert json.loads(stored.read_text())["hash"] == expected


def test_a_hash_that_cannot_be_stored_is_returned_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file instead of a folder")
    with caplog.at_level(logging.WARNING):
        assert _file_hash(model, tmp_path / "cache") == _file_hash(model, None)
    assert "cache.hash_not_saved" in caplog.text


@pytest.mark.parametrize(
    ("original", "override", "expected"),
    [
        (None, None, False),
        ("4096", None, False),
        ("4095", None, True),
        ("8192", 4095, True),
        ("1024", 4096, False),
        (None, 4095, True),
    ],
)
def test_a_context_longer_than_the_original_one_uses_other_rope_factors(
    model: Path, original: str | None, override: int | None, expected: bool
) -> None:
    key = "phi3.rope.scaling.original_context_length"
    values = {"general.architecture": "phi3", key: original}
    options = ModelOptions(override_kv=() if override is None else (MetadataOverride(key, override),))
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(metadata=values.get, options=options, n_ctx_train=4096),
        context=SimpleNamespace(cells_per_sequence=4096),
    )
    assert _has_long_context(model, engine) is expected


@pytest.mark.starts_processes  # it loads models
@pytest.mark.parametrize("has_factors", [False, True])
def test_without_an_original_context_llama_cpp_chooses_rope_factors_by_the_training_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_factors: bool
) -> None:
    if has_factors:
        add_rope_factors(monkeypatch)
    path = write_model(tmp_path / "model.gguf", replace(PLAIN, n_ctx=256))
    loaded = [load(path, n_ctx=n_ctx) for n_ctx in (256, 512)]
    (first, first_found), (second, second_found) = loaded
    assert [engine.context.cells_per_sequence for engine, _ in loaded] == [256, 512]
    assert (compute(first) == compute(second)) is (first_found == second_found) is not has_factors
    for engine, _ in loaded:
        engine.close()


def add_rope_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `write_model` write a model with two sets of RoPE factors."""

    def tensors(spec: ModelSpec) -> Iterator[Tensor]:
        yield from model_tensors(spec)
        for name, factor in (("long", 4), ("short", 1)):
            yield Values(f"rope_factors_{name}.weight", np.full(spec.head_dim // 2, factor, np.float32))

    add_metadata = writer._add_metadata

    def add_metadata_and_scaling(file: Any, spec: ModelSpec) -> None:
        add_metadata(file, spec)
        file.add_rope_scaling_type(RopeScalingType.LONGROPE)

    monkeypatch.setattr(writer, "model_tensors", tensors)
    monkeypatch.setattr(writer, "_add_metadata", add_metadata_and_scaling)


@pytest.mark.starts_processes  # it loads models
@pytest.mark.parametrize("types", list(product(("f16", "q8_0"), repeat=2)), ids="-".join)
def test_quantized_cells_that_llama_cpp_does_not_rotate_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, str]
) -> None:
    path = write_model(tmp_path / "model.gguf", replace(PLAIN, head_dim=64))  # llama.cpp rotates multiples of 64
    cells, found = [], []
    for is_rotated in (True, False):
        if not is_rotated:
            monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
        engine, fingerprint_ = load(path, cache_type_k=types[0], cache_type_v=types[1])
        cells.append(compute(engine))
        found.append(fingerprint_)
        engine.close()
    assert (cells[0] == cells[1]) is (found[0] == found[1]) is (types == ("f16", "f16"))
    assert "ROT" not in found[0], "files of workers without this variable stay valid"


@pytest.mark.starts_processes  # it loads a model
def test_llama_cpp_returns_the_metadata_of_the_file_also_if_they_are_overridden(chat_model: Path) -> None:
    """Therefore `_has_long_context` reads the overrides."""
    engine, _ = load(chat_model, override_kv=("llama.context_length=int:1234",))
    assert engine.model.n_ctx_train == 1234
    assert engine.model.metadata("llama.context_length") == "4096"
    engine.close()


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_worker_with_another_number_of_slots_loads_a_state_if_the_fingerprints_are_equal(
    any_model: Path, kv_unified: bool
) -> None:
    settings = [WorkerSettings(n_ctx=64, n_parallel=n, kv_unified=kv_unified, n_threads=1) for n in (1, 2)]
    saving, loading = engines = [load_engine(any_model, each) for each in settings]
    one, other = map(fingerprint, [any_model] * 2, settings, engines)
    saving.context.batch.clear()
    saving.context.batch.add_chunk([1, 2, 3], 0, 0, has_row=False)
    assert saving.context.decode() == 0
    assert loading.sequences.load(0, 0, 3, saving.sequences.save(0, 0, 3), 0) is (one == other)
    assert one == other or not kv_unified
    for engine in engines:
        engine.close()


@pytest.mark.starts_processes  # it loads models
def test_a_worker_with_another_control_vector_scale_or_range_has_another_fingerprint(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(PLAIN, n_layers=3))
    one, other = (
        str(write_control_vector(tmp_path / f"{seed}.gguf", draw_directions(path, 1, 2, seed=seed))) for seed in (1, 2)
    )
    drawn: list[dict[str, Any]] = [
        {},
        {"control_vector": (one,)},
        {"control_vector": (other,)},
        {"control_vector": (one, other)},
        {"control_vector": (f"{one}:0.5",)},
        {"control_vector": (one,), "control_vector_layer_range": (1, 1)},
        {"control_vector": (one,), "control_vector_layer_range": (2, 2)},
    ]
    found = []
    for changes in drawn * 2:
        settings = WorkerSettings(n_ctx=64, n_threads=1, **changes)
        engine = load_engine(path, settings)
        found.append(fingerprint(path, settings, engine))
        engine.close()
    assert found[: len(drawn)] == found[len(drawn) :]
    assert len(set(found)) == len(drawn)


def load(path: Path, **values: Any) -> tuple[Engine, str]:
    """Return the engine of a worker with these settings, and its fingerprint."""
    settings = WorkerSettings(**{"n_ctx": 64, "n_threads": 1, "warmup": False, **values})
    engine = load_engine(path, settings)
    return engine, fingerprint(path, settings, engine)


def fingerprint_with(path: Path, **values: Any) -> str:
    engine, found = load(path, **values)
    engine.close()
    return found


ROPE: list[dict[str, Any]] = [
    *({"rope_scaling": name} for name in ("none", "linear", "yarn")),
    *({"rope_scale": factor} for factor in (2, 4)),
    {"rope_freq_scale": 0.125},
    {"rope_freq_base": 5000},
    {"yarn_orig_ctx": 32},
    {"yarn_ext_factor": 0.5},
    {"yarn_attn_factor": 0.5},
    {"yarn_beta_slow": 0.5},
    {"yarn_beta_fast": 0.5},
]


def test_each_setting_that_changes_cells_changes_the_fingerprint(chat_model: Path, tmp_path: Path) -> None:
    assert {name for values in ROPE for name in values} == set(RopeSettings.model_fields)
    one, other = (str(write_lora(tmp_path / f"{seed}.gguf", chat_model, seed=seed)) for seed in (1, 2))
    drawn: list[dict[str, Any]] = [
        {},
        {"flash_attn": "off"},
        {"cache_type_k": "q8_0"},
        {"cache_type_v": "q8_0"},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"swa_full": False},
        *ROPE,
        *({"cache_salt": salt} for salt in ("a", "b")),
        *({"lora": (lora,)} for lora in (one, other, f"{one}:0.5")),
        *({"lora": loras} for loras in ((one, other), (other, one))),
        *({"override_kv": (f"llama.rope.freq_base=float:{base}",)} for base in (5000, 20_000)),
    ]
    found = [fingerprint_with(chat_model, **values) for values in drawn]
    equal = [values for values, each in zip(drawn, found, strict=True) if found.count(each) > 1]
    assert equal == []


@pytest.mark.parametrize(
    "values",
    [
        {"n_threads": 2},
        {"n_threads_batch": 2},
        {"n_batch": 32},
        {"n_ubatch": 16},
        {"n_ctx": 512},
        {"chunk_size": 8},
        {"kv_offload": False},
        {"op_offload": False},
        {"repack": False},
        {"use_mmap": False},
        {"lazy_mode": "on"},
        {"check_tensors": True},
        {"warmup": True},
        {"held_cells": 8},
        {"cache_sequences": 2},
        {"cache_ram_mb": 1},
        {"cache_disk_mb": 1},
        {"temperature": 0.1},
        {"model_sampling": False},
        {"speculation": "ngram"},
    ],
    ids=str,
)
def test_a_setting_that_changes_no_cells_does_not_change_the_fingerprint(
    chat_model: Path, default_fingerprint: str, values: dict[str, Any]
) -> None:
    assert fingerprint_with(chat_model, **values) == default_fingerprint


def test_threads_and_numa_nodes_do_not_change_the_fingerprint(chat_model: Path, default_fingerprint: str) -> None:
    """No engine is created with these settings, because llama.cpp or the system may refuse them."""
    engine, _ = load(chat_model)
    for values in ({"poll": 0}, {"prio": 2}, {"cpu_range": "0-1", "cpu_strict": True}, {"numa": "distribute"}):
        settings = WorkerSettings.model_validate({"n_ctx": 64, **values})
        assert fingerprint(chat_model, settings, engine) == default_fingerprint, values
    engine.close()


@pytest.fixture(scope="module")
def default_fingerprint(chat_model: Path) -> str:
    return fingerprint_with(chat_model)


@pytest.mark.starts_processes  # it loads models
def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{seed}-{copy}.gguf", PLAIN, seed=seed) for seed in (1, 2) for copy in (0, 1)]
    first, same, other, _ = map(fingerprint_with, paths)
    assert first == same
    assert first != other


def test_all_files_of_a_split_model_are_part_of_the_fingerprint(chat_model: Path, tmp_path: Path) -> None:
    engine, _ = load(chat_model)
    first, second = (tmp_path / f"model-{number:05}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"metadata")
    found = []
    for weights in (b"weights", b"Weights", b"weights"):
        second.write_bytes(weights)
        found.append(fingerprint(first, WorkerSettings(), engine))
    engine.close()
    assert found[0] == found[2] != found[1]


def compute(engine: Engine) -> bytes:
    """Compute three cells of the first sequence, and return their saved state."""
    engine.context.batch.clear()
    engine.context.batch.add_chunk([1, 2, 3], 0, 0, has_row=False)
    assert engine.context.decode() == 0
    return bytes(engine.sequences.save(0, 0, 3))


def test_flash_attention_that_llama_cpp_chooses_has_the_cells_of_flash_attention(any_model: Path) -> None:
    loaded = {name: load(any_model, flash_attn=name) for name in ("auto", "on", "off")}
    saved = {name: compute(engine) for name, (engine, _) in loaded.items()}
    for (name, (engine, found)), (other, (_, other_found)) in product(loaded.items(), repeat=2):
        assert (found == other_found) == ((name == "off") == (other == "off")), (name, other)
        assert engine.sequences.load(1, 0, 3, saved[other], 0) or found != other_found, (name, other)
        engine.sequences.remove(1)
    for engine, _ in loaded.values():
        engine.close()


@pytest.mark.cpu  # a GPU may have no flash attention for this model; then `on` computes it on the CPU
def test_flash_attention_that_llama_cpp_chooses_computes_the_same_bytes_as_flash_attention(any_model: Path) -> None:
    saved = []
    for name in ("auto", "on"):
        engine, _ = load(any_model, flash_attn=name)
        saved.append(compute(engine))
        engine.close()
    assert saved[0] == saved[1]
