"""The settings of GPUs, memory and NUMA nodes, from the environment to llama.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from llamaq.worker.engine.ggml_functions import declare
from llamaq.worker.process.engine_options import load_model, model_options
from llamaq.worker.settings import load_settings

TENSOR_SPLIT, OVERRIDES = "tensor_split", "tensor_buft_overrides"


class Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def model_params(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    """Return the numbers and lists of the `llama_model_params` of a worker with these environment variables."""
    for name, value in variables.items():
        monkeypatch.setenv(f"LLAMAQ_{name.upper()}", value)
    params, kept = model_options(load_settings()).to_params()
    fields = {name: getattr(params, name) for name, *_ in params._fields_}
    found: dict[str, Any] = {name: value for name, value in fields.items() if isinstance(value, int)}
    found[TENSOR_SPLIT] = list(params.tensor_split[:3]) if params.tensor_split else None
    found[OVERRIDES] = _overrides(params.tensor_buft_overrides)
    del kept
    return found


def _overrides(address: int | None) -> list[tuple[str, str]]:
    """Return the pattern and the name of the buffer of each override."""
    name_of = declare({"ggml_backend_buft_name": ([ctypes.c_void_p], ctypes.c_char_p)}).ggml_backend_buft_name
    rows: Any = ctypes.cast(address, ctypes.POINTER(Override)) if address else [Override()]
    found: list[tuple[str, str]] = []
    while (row := rows[len(found)]).pattern:
        found.append((row.pattern.decode(), name_of(row.buffer).decode()))
    return found


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"split_mode": "none"}, {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE}),
        ({"split_mode": "layer"}, {}),
        ({"split_mode": "row"}, {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_ROW}),
        ({"split_mode": "tensor"}, {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_TENSOR}),
        ({"main_gpu": "2"}, {"main_gpu": 2}),
        ({"device": "3"}, {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE, "main_gpu": 3}),
        (
            {"device": "0", "main_gpu": "2", "split_mode": "row"},
            {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE},
        ),
        ({"tensor_split": "3,0.5"}, {TENSOR_SPLIT: [3, 0.5, 0]}),
        ({"override_tensor": r"ffn_.*=CPU,blk\.0=CPU"}, {OVERRIDES: [("ffn_.*", "CPU"), (r"blk\.0", "CPU")]}),
        ({"override_tensor": "a=b=CPU"}, {OVERRIDES: [("a=b", "CPU")]}),
        ({"n_gpu_layers": "7"}, {"n_gpu_layers": 7}),
        ({"repack": "false"}, {"use_extra_bufts": False}),
        ({"check_tensors": "true"}, {"check_tensors": True}),
        ({"lazy_mode": "on"}, {"lazy_mode": llama_cpp.LLAMA_LAZY_MODE_ON}),
        ({"lazy_mode": "off"}, {"lazy_mode": llama_cpp.LLAMA_LAZY_MODE_OFF}),
        ({"use_mmap": "true"}, {"load_mode": llama_cpp.LLAMA_LOAD_MODE_MMAP}),
        ({"use_mmap": "false"}, {"load_mode": llama_cpp.LLAMA_LOAD_MODE_NONE}),
        ({"use_mlock": "true"}, {"load_mode": llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK}),
        ({"use_mlock": "true", "use_mmap": "true"}, {"load_mode": llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK}),
        ({"use_mlock": "true", "use_mmap": "false"}, {"load_mode": llama_cpp.LLAMA_LOAD_MODE_MLOCK}),
        ({"use_direct_io": "true"}, {"load_mode": llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO}),
    ],
    ids=str,
)
def test_a_setting_of_devices_and_memory_changes_its_parameter_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: dict[str, Any]
) -> None:
    default = model_params(monkeypatch)
    params = model_params(monkeypatch, **variables)
    assert {name: value for name, value in params.items() if value != default[name]} == expected


def test_by_default_llama_cpp_chooses_how_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    params = model_params(monkeypatch)
    assert params["load_mode"] == llama_cpp.LLAMA_LOAD_MODE_AUTO
    assert params["lazy_mode"] == llama_cpp.LLAMA_LAZY_MODE_AUTO
    assert (params["split_mode"], params["main_gpu"]) == (llama_cpp.LLAMA_SPLIT_MODE_LAYER, 0)
    assert (params[TENSOR_SPLIT], params[OVERRIDES]) == (None, [])


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        ("off", []),
        ("distribute", [llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE]),
        ("isolate", [llama_cpp.GGML_NUMA_STRATEGY_ISOLATE]),
        ("numactl", [llama_cpp.GGML_NUMA_STRATEGY_NUMACTL]),
    ],
)
def test_the_strategy_for_numa_nodes_is_set_before_the_model_is_loaded(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, value: str, calls: list[int]
) -> None:
    """It is not set in this process: ggml would keep it for all later tests."""
    monkeypatch.setenv("LLAMAQ_NUMA", value)
    made: list[object] = []
    load = llama_cpp.llama_model_load_from_file

    def record_load(*args: Any) -> Any:
        made.append("model")
        return load(*args)

    monkeypatch.setattr(llama_cpp, "llama_backend_init", lambda: made.append("backends"))
    monkeypatch.setattr(llama_cpp, "llama_numa_init", made.append)
    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", record_load)
    load_model(chat_model, load_settings()).close()
    assert made == ["backends", *calls, "model"]
