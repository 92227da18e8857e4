"""Declarations of llama.cpp's functions that are called often.

llama_cpp, the Python package, declares the functions of llama.cpp with ctypes pointers. Converting the arguments to
these pointers takes longer than the calls themselves. In the declarations of this module, pointers are plain integers.
Functions that only read or change a few numbers keep the GIL: another thread that took it would keep it for longer than
the call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from llamaq.worker.engine.llama_log import has_gpu

_library = llama_cpp.llama_cpp._lib
_library_with_gil = ctypes.PyDLL(_library._name, handle=_library._handle)


def _declare(name: str, argument_types: list[Any], result_type: Any, *, releases_gil: bool = False) -> Any:
    """Return a function of llama.cpp with the given C types. The declaration in llama_cpp does not change."""
    function = (_library if releases_gil else _library_with_gil)[name]
    function.argtypes = argument_types
    function.restype = result_type
    return function


_waits = has_gpu()
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
