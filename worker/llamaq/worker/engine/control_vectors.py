"""Control vectors: directions that llama.cpp adds to the output of layers, to steer what a model writes.

The files are those of llama.cpp's `cvector-generator` and of repeng: a GGUF file with an F32 tensor `direction.N` for
each layer N that it changes. The first layer, number 0, cannot be changed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _ggml

from llamaq.common.errors import EngineError, ModelError
from llamaq.worker.engine.scaled_file import ScaledFile

_DIRECTION = re.compile(r"direction\.(\d{1,9})")
_F32 = 0
"""GGML_TYPE_F32"""

Direction = npt.NDArray[np.float32]
"""What is added to the output of one layer, shape (n_embd,)."""


class ControlVectors:
    """The sum of several control vectors for one model.

    Args:
        model: Pointer to the llama_model.
        vectors: The files, and their scales.
        layers: The first and the last layer to change. Empty: all layers that the files name.

    Raises:
        ModelError: A file cannot be read, has no directions, or is not for this model.
    """

    def __init__(self, model: Any, vectors: Sequence[ScaledFile], layers: tuple[int, ...] = ()) -> None:
        n_layers, n_embd = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_embd(model)
        self._layers = layers or (1, n_layers)
        self._sum = np.zeros((n_layers, n_embd), np.float32)
        """The direction of layer N in row N. Row 0 remains zero."""
        self._is_empty = not vectors
        for vector in vectors:
            for layer, direction in _read_directions(vector.path):
                if not 0 < layer < n_layers or len(direction) != n_embd:
                    raise ModelError(
                        f"--control-vector: {vector.path} is not for this model, which has the layers 0 to "
                        f"{n_layers - 1} and {n_embd} dimensions: direction.{layer} has {len(direction)} dimensions"
                    )
                if not np.isfinite(direction).all():
                    raise ModelError(f"--control-vector: {vector.path}: direction.{layer} has values like NaN")
                self._sum[layer] += np.float32(vector.scale) * direction

    def apply(self, context: Any) -> None:
        """Let a llama_context of the model add the directions from its next batch on.

        Raises:
            EngineError: llama.cpp cannot use them.
        """
        if self._is_empty:
            return
        from_layer_1 = self._sum[1:]
        data = from_layer_1.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        n_embd = from_layer_1.shape[1]
        if llama_cpp.llama_set_adapter_cvec(context, data, from_layer_1.size, n_embd, *self._layers):
            raise EngineError("--control-vector: llama.cpp cannot use the vectors; see its log for the reason")


def _read_directions(path: Path) -> Iterator[tuple[int, Direction]]:
    """Yield the number of each layer and its direction. Raises `ModelError`."""
    library = _declared_library()
    file = library.gguf_init_from_file(str(path).encode(), _GgufInitParams(no_alloc=True, ctx=None))
    if not file:
        raise ModelError(f"--control-vector: llama.cpp cannot read {path}; see its log for the reason")
    try:
        n_tensors = library.gguf_get_n_tensors(file)
        if not n_tensors:
            raise ModelError(f"--control-vector: {path} has no directions")
        for index in range(n_tensors):
            name = library.gguf_get_tensor_name(file, index).decode()
            match = _DIRECTION.fullmatch(name)
            if match is None or library.gguf_get_tensor_type(file, index) != _F32:
                raise ModelError(
                    f"--control-vector: {path} is not a control vector: each of its tensors must be a direction.N with "
                    f"numbers of the type F32, and {name} is not"
                )
            offset = library.gguf_get_data_offset(file) + library.gguf_get_tensor_offset(file, index)
            n_bytes = library.gguf_get_tensor_size(file, index)
            yield int(match[1]), np.fromfile(path, np.float32, n_bytes // np.dtype(np.float32).itemsize, offset=offset)
    finally:
        library.gguf_free(file)


class _GgufInitParams(ctypes.Structure):
    """gguf_init_params"""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _declared_library() -> Any:
    """Return ggml's library, with the C types of the functions that read GGUF files."""
    library, file, index = _ggml.libggml, ctypes.c_void_p, ctypes.c_int64
    for function, argument_types, result_type in (
        (library.gguf_init_from_file, [ctypes.c_char_p, _GgufInitParams], file),
        (library.gguf_free, [file], None),
        (library.gguf_get_n_tensors, [file], ctypes.c_int64),
        (library.gguf_get_data_offset, [file], ctypes.c_size_t),
        (library.gguf_get_tensor_name, [file, index], ctypes.c_char_p),
        (library.gguf_get_tensor_type, [file, index], ctypes.c_int),
        (library.gguf_get_tensor_offset, [file, index], ctypes.c_size_t),
        (library.gguf_get_tensor_size, [file, index], ctypes.c_size_t),
    ):
        function.argtypes, function.restype = argument_types, result_type
    return library
