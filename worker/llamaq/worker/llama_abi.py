"""Whether the llama.cpp that is installed is one that this code was written for.

ctypes cannot see a changed struct: it would write parameters into the wrong places. So before the first call, sizes,
and the places of well-known defaults, are compared.
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
    "n_threads": 4,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "no_perf": True,
    "swa_full": True,
    "kv_unified": False,
}


@cache
def check_abi() -> None:
    """Raise `EngineError` unless llama_cpp has a supported version and its structs are as expected."""
    version = tuple(int(number) for number in re.findall(r"\d+", llama_cpp.__version__)[:3])
    if not SUPPORTED_FROM <= version < SUPPORTED_BELOW:
        wanted = f">={_dotted(SUPPORTED_FROM)},<{_dotted(SUPPORTED_BELOW)}"
        raise EngineError(f"llama-cpp-python {llama_cpp.__version__} is installed, llamaq needs {wanted}")
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


def _mismatch(what: str) -> str:
    return f"llama-cpp-python {llama_cpp.__version__} does not fit its own library or llamaq: {what}"
