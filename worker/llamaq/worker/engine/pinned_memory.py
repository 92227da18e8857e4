"""Host memory that a GPU reads and writes directly. Copies of other memory go through a small buffer of the driver."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import _ggml

from llamaq.worker.engine.llama_log import has_gpu

_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


def allocate_pinned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory whose contents are undefined: pinned if llama.cpp has a GPU that can pin it, else ordinary.

    Raises:
        MemoryError: The system has not enough memory.
    """
    buffer = _allocate(n_bytes) if has_gpu() else None
    if buffer is None:
        return np.empty(n_bytes, np.uint8)
    bytes_type: Any = ctypes.c_uint8 * n_bytes
    memory = bytes_type.from_address(_function("ggml_backend_buffer_get_base")(buffer))
    weakref.finalize(memory, _function("ggml_backend_buffer_free", None), buffer).atexit = False
    return np.frombuffer(memory, np.uint8)


def _allocate(n_bytes: int) -> int | None:
    device = _function("ggml_backend_dev_by_type", argument=ctypes.c_int)(_GPU)
    buffer_type = _function("ggml_backend_dev_host_buffer_type")(device) if device else None
    if not buffer_type:
        return None
    allocate = _ggml.libggml.ggml_backend_buft_alloc_buffer
    allocate.argtypes, allocate.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    buffer: int | None = allocate(buffer_type, n_bytes)
    return buffer


def _function(name: str, result: Any = ctypes.c_void_p, *, argument: Any = ctypes.c_void_p) -> Any:
    """Return a function of ggml with one argument."""
    function = getattr(_ggml.libggml, name)
    function.argtypes, function.restype = [argument], result
    return function
