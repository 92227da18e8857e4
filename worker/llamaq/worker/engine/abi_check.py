"""Checks that the installed llama.cpp has the binary interface that this code was written for.

ctypes does not detect that llama.cpp has changed a struct; it would write parameters to wrong addresses. So `check_abi`
compares the sizes of structs and some default parameters with the expected values, before any other call of llama.cpp.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import llama_cpp

from llamaq.common.errors import EngineError

SUPPORTED_FROM, SUPPORTED_BELOW = (0, 3, 36), (0, 4, 0)
_SIZES = {"llama_batch": 56, "llama_token_data": 12, "llama_token_data_array": 32}
_MODEL_DEFAULTS = {"split_mode": 1, "main_gpu": 0, "vocab_only": False, "check_tensors": False}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "pooling_type": -1,
    "no_perf": True,
    "swa_full": True,
    "kv_unified": False,
}


@cache
def check_abi() -> None:
    """Compare the version, the struct sizes and the default parameters of llama_cpp with the expected values.

    Raises:
        EngineError: The version is not supported, or a size or a parameter differs.
    """
    version = tuple(int(number) for number in re.findall(r"\d+", llama_cpp.__version__)[:3])
    if not SUPPORTED_FROM <= version < SUPPORTED_BELOW:
        wanted = f">={_dotted(SUPPORTED_FROM)},<{_dotted(SUPPORTED_BELOW)}"
        raise EngineError(f"llama-cpp-python {llama_cpp.__version__} is installed, but llamaq needs {wanted}")
    for name, size in _SIZES.items():
        if ctypes.sizeof(getattr(llama_cpp, name)) != size:
            raise EngineError(_mismatch(f"{name} has {ctypes.sizeof(getattr(llama_cpp, name))} bytes, not {size}"))
    _check_defaults("llama_model_params", llama_cpp.llama_model_default_params(), _MODEL_DEFAULTS)
    _check_defaults("llama_context_params", llama_cpp.llama_context_default_params(), _CONTEXT_DEFAULTS)


def _check_defaults(name: str, params: Any, expected: Mapping[str, object]) -> None:
    for field, value in expected.items():
        found = getattr(params, field)
        if found != value:
            raise EngineError(_mismatch(f"{name}.{field} is {found} by default, not {value}"))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _mismatch(difference: str) -> str:
    return f"llama-cpp-python {llama_cpp.__version__} does not match its own library or llamaq: {difference}"
