"""Checks that the installed llama.cpp has the binary interface that this code was written for.

ctypes does not detect that llama.cpp has changed a struct; it would write parameters to wrong addresses. So `check_abi`
compares the sizes of structs and some default parameters with the expected values, before any other call of llama.cpp.

llama_cpp, the Python package, declares the functions of llama.cpp with ctypes pointers. Converting the arguments to
these pointers takes longer than the calls themselves. So for functions that are called often, this module has a second
declaration in which pointers are plain integers. Those that only read or change a few numbers keep the GIL: another
thread that took it would keep it for longer than the call.
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


_library = llama_cpp.llama_cpp._lib
_library_with_gil = ctypes.PyDLL(_library._name, handle=_library._handle)


def _declare(name: str, argument_types: list[Any], result_type: Any, *, releases_gil: bool = False) -> Any:
    """Return a function of llama.cpp with the given C types. The declaration in llama_cpp does not change."""
    function = (_library if releases_gil else _library_with_gil)[name]
    function.argtypes = argument_types
    function.restype = result_type
    return function


_waits = bool(llama_cpp.llama_supports_gpu_offload())
"""Whether a call that reads results may wait for a device. A CPU has computed them when `llama_decode` returns."""

get_logits = _declare("llama_get_logits", [ctypes.c_void_p], ctypes.c_void_p, releases_gil=_waits)
get_sampled_logits = _declare(
    "llama_get_sampled_logits_ith", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_void_p, releases_gil=_waits
)
get_sampled_candidates = _declare(
    "llama_get_sampled_candidates_ith", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_void_p, releases_gil=_waits
)
get_sampled_logits_count = _declare(
    "llama_get_sampled_logits_count_ith", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_uint32, releases_gil=_waits
)
get_embeddings = _declare("llama_get_embeddings", [ctypes.c_void_p], ctypes.c_void_p, releases_gil=_waits)
get_embeddings_seq = _declare(
    "llama_get_embeddings_seq", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_void_p, releases_gil=_waits
)
clear_memory = _declare("llama_memory_clear", [ctypes.c_void_p, ctypes.c_bool], None)
seq_rm = _declare("llama_memory_seq_rm", [ctypes.c_void_p] + [ctypes.c_int32] * 3, ctypes.c_bool)
seq_cp = _declare("llama_memory_seq_cp", [ctypes.c_void_p] + [ctypes.c_int32] * 4, None)
state_size = _declare("llama_state_seq_get_size", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_size_t, releases_gil=True)
state_get = _declare(
    "llama_state_seq_get_data",
    [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32],
    ctypes.c_size_t,
    releases_gil=True,
)
state_set = _declare(
    "llama_state_seq_set_data",
    [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32],
    ctypes.c_size_t,
    releases_gil=True,
)
seq_pos_min = _declare("llama_memory_seq_pos_min", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_int32)
seq_pos_max = _declare("llama_memory_seq_pos_max", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_int32)
