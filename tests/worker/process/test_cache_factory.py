"""How the settings and the kind of model determine the sequences, cells and tiers of the prefix cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.kv_cache.offload_interface import NoOffload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.process import engine_options
from llamaq.worker.process.cache_factory import (
    MIB,
    choose_held_cells,
    choose_held_draft_cells,
    choose_n_sequences,
    make_offload,
    make_prefix_cache,
    make_saved_slot_files,
)
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.testing import FakeEngine


def model(*, is_recurrent: bool = False, n_swa: int = 0) -> Any:
    return SimpleNamespace(is_recurrent=is_recurrent, n_swa=n_swa)


def engine(n_ctx: int = 8192, *, kv_unified: bool = True) -> Any:
    """Return the parts of an engine that the factory reads."""
    sequences = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=8, kv_unified=kv_unified).sequences
    context = SimpleNamespace(n_ctx=n_ctx, n_seq_max=8, kv_unified=kv_unified, cells_per_sequence=n_ctx)
    model = SimpleNamespace(
        metadata=lambda _: None, options=ModelOptions(), is_purely_recurrent=False, n_ctx_train=n_ctx
    )
    return SimpleNamespace(sequences=sequences, context=context, model=model)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize(
    ("settings", "is_recurrent", "n_sequences"),
    [
        ({}, False, 4 + 64 + 1),
        ({"cache_sequences": 10}, False, 4 + 10 + 1),
        ({"cache_sequences": 0}, False, 4 + 1),
        ({"cache_sequences": 10, "kv_unified": False}, False, 4 + 10),
        ({"kv_unified": False}, False, 4),
        ({"cache_prompt": False}, False, 4),
        ({"n_parallel": 6}, True, 6 + 3 * 6 + 1),
        ({"n_parallel": 250}, False, 256),
        ({"n_batch": 20, "n_ubatch": 20}, False, 20),
    ],
)
def test_the_number_of_sequences_follows_from_slots_cache_and_limits(
    settings: dict[str, Any], is_recurrent: bool, n_sequences: int
) -> None:
    assert choose_n_sequences(WorkerSettings(**settings), model(is_recurrent=is_recurrent)) == n_sequences


@pytest.mark.parametrize(
    ("settings", "n_sequences"),
    [
        ({}, 2 * (4 + 32) + 1),
        ({"cache_sequences": 10}, 2 * (4 + 10) + 1),
        ({"kv_unified": False}, 4),
        ({"cache_prompt": False}, 4),
        ({"n_parallel": 120}, 256),
        ({"n_parallel": 200}, 200),
    ],
)
def test_with_a_sliding_window_each_sequence_has_a_guard(settings: dict[str, Any], n_sequences: int) -> None:
    assert choose_n_sequences(WorkerSettings(**settings), model(n_swa=512)) == n_sequences


@pytest.mark.parametrize(
    ("settings", "can_save_parts", "n_cells"),
    [
        ({"n_gpu_layers": 0}, True, 0),
        ({"n_gpu_layers": 0}, False, 256),
        ({"n_gpu_layers": 0, "n_ctx": 512}, False, 128),
        ({"n_gpu_layers": 0, "cache_ram_mb": 0}, True, 2048),
        ({"held_cells": 7}, True, 7),
    ],
)
def test_on_a_cpu_cached_sequences_hold_few_cells_if_they_can_move_to_host_memory(
    settings: dict[str, Any], can_save_parts: bool, n_cells: int
) -> None:
    chosen = WorkerSettings(**settings)
    assert choose_held_cells(chosen, engine(chosen.n_ctx, kv_unified=can_save_parts)) == n_cells


@pytest.mark.parametrize(("settings", "n_cells"), [({"n_gpu_layers": 0}, 256), ({"held_cells": 7}, 7)])
def test_idle_sequences_of_a_draft_model_keep_cells_on_a_cpu(settings: dict[str, Any], n_cells: int) -> None:
    assert choose_held_draft_cells(WorkerSettings(**settings), engine(8192)) == n_cells


def test_without_a_prefix_cache_there_are_no_tiers_and_no_saved_slots(tmp_path: Path, model_file: Path) -> None:
    settings = WorkerSettings(cache_prompt=False, cache_dir=tmp_path / "cache")
    assert isinstance(make_prefix_cache(settings, engine()), NullPrefixCache)
    assert isinstance(make_offload(settings, engine(), model_file), NoOffload)
    assert make_saved_slot_files(settings, engine(), model_file) is None
    assert not (tmp_path / "cache").exists()


def test_without_host_memory_and_folder_there_are_no_tiers(model_file: Path) -> None:
    settings = WorkerSettings(cache_ram_mb=0)
    assert isinstance(make_prefix_cache(settings, engine()), RadixPrefixCache)
    assert isinstance(make_offload(settings, engine(), model_file), NoOffload)
    assert make_saved_slot_files(settings, engine(), model_file) is None


@pytest.mark.parametrize("kv_unified", [True, False])
def test_the_tiers_have_the_sizes_of_the_settings(tmp_path: Path, model_file: Path, kv_unified: bool) -> None:
    folder = tmp_path / "cache"
    settings = WorkerSettings(cache_ram_mb=3, cache_disk_mb=5, cache_dir=folder)
    offload = make_offload(settings, engine(kv_unified=kv_unified), model_file)
    assert isinstance(offload, BlockTransfers)
    assert f"host 0/{3 * MIB} bytes, disk 0/{5 * MIB} bytes" in repr(offload)
    offload.close((), 1)
    assert make_saved_slot_files(settings, engine(kv_unified=kv_unified), model_file) is not None
    host_only = make_offload(WorkerSettings(cache_ram_mb=3), engine(kv_unified=kv_unified), model_file)
    assert f"host 0/{3 * MIB} bytes, disk 0/0 bytes" in repr(host_only)
    host_only.close((), 1)


@pytest.mark.parametrize(("gpu", "n_gpu_layers"), [(False, -1), (True, 0), (True, -1)])
def test_only_a_gpu_saves_no_blocks_that_it_computes_as_fast(
    monkeypatch: pytest.MonkeyPatch, model_file: Path, *, gpu: bool, n_gpu_layers: int
) -> None:
    monkeypatch.setattr(engine_options, "has_gpu", lambda: gpu)
    built = engine()
    offload = make_offload(WorkerSettings(cache_ram_mb=3, n_gpu_layers=n_gpu_layers), built, model_file)
    entries = []
    for seq_id in range(5):
        built.sequences.append(seq_id, tokens := [seq_id] * 64)
        entries.append(CachedSequence(seq_id, pack(tokens), Scope()))
    for entry in entries:
        offload.start_save(entry)
        while offload.has_transfers:
            offload.step(0, prefill_token_s=1e-12)  # as if computing took no time
    is_saved = [offload.match(entry.tokens, Scope()) is not None for entry in entries]
    assert is_saved == [True] * 3 + [not gpu or n_gpu_layers == 0] * 2
