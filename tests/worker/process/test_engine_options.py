"""How settings become options of llama.cpp, as llama.cpp's own log and answers show."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from llamaq.common.errors import ModelError
from llamaq.worker.process.engine_options import context_options, load_model
from llamaq.worker.settings import load_settings

N_LAYERS = 3
EXPERTS_OF_A_LAYER = {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
OVERRIDDEN = re.compile(r"tensor blk\.(\d+)\.(\w+)\.weight .* buffer type overridden to CPU")


@pytest.mark.parametrize(
    ("values", "n_layers"),
    [({}, 0), ({"cpu_moe": True}, N_LAYERS), ({"n_cpu_moe": 2}, 2), ({"n_cpu_moe": 99}, N_LAYERS)],
)
def test_experts_are_stored_in_host_memory(
    expert_model: Path, caplog: pytest.LogCaptureFixture, values: Mapping[str, Any], n_layers: int
) -> None:
    caplog.set_level(logging.DEBUG)
    load_model(expert_model, load_settings(**values)).close()
    found = {(int(match[1]), match[2]) for match in map(OVERRIDDEN.search, caplog.messages) if match}
    assert found == {(layer, name) for layer in range(n_layers) for name in EXPERTS_OF_A_LAYER}


def test_experts_and_other_tensors_are_stored_in_host_memory(
    expert_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    load_model(expert_model, load_settings(cpu_moe=True, override_tensor="attn_q=CPU")).close()
    names = [match[2] for match in map(OVERRIDDEN.search, caplog.messages) if match]
    assert "attn_q" in names
    assert set(names) >= EXPERTS_OF_A_LAYER


def test_invalid_weights_are_refused_on_request(expert_model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(expert_model, tmp_path))
    [weights] = [tensor.data for tensor in GGUFReader(path, "r+").tensors if tensor.name == "blk.1.attn_v.weight"]
    weights[3, 5] = np.nan
    weights.flush()
    load_model(path, load_settings()).close()
    with pytest.raises(ModelError, match="cannot load"):
        load_model(path, load_settings(check_tensors=True))


@pytest.mark.parametrize("value", [True, False])
def test_switches_reach_llama_cpp(value: bool) -> None:
    settings = load_settings(op_offload=value, kv_offload=value)
    params = context_options(settings, n_ctx=64, n_batch=64, n_ubatch=64, n_seq_max=1).to_params()
    assert (params.op_offload, params.offload_kqv) == (value, value)
