from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.control_vector_files import draw_directions, write_control_vector

from llamaq.tools.random_gguf import PLAIN, write_model
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


@pytest.mark.parametrize(("original", "expected"), [(None, False), ("4096", False), ("4095", True)])
def test_a_context_longer_than_the_original_one_uses_other_rope_factors(original: str | None, expected: bool) -> None:
    values = {"general.architecture": "phi3", "phi3.rope.scaling.original_context_length": original}
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(metadata=values.get), context=SimpleNamespace(cells_per_sequence=4096)
    )
    assert _has_long_context(engine) is expected


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
