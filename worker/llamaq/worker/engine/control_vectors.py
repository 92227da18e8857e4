"""Control vectors: directions that llama.cpp adds to the output of layers, to steer what a model writes.

The files are those of llama.cpp's `cvector-generator` and of repeng: a GGUF file with an F32 tensor `direction.N` for
each layer N that it changes. The first layer, number 0, cannot be changed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaq.common.errors import EngineError, ModelError
from llamaq.worker.engine.ggml_functions import declare
from llamaq.worker.engine.scaled_file import ScaledFile

_DIRECTION = re.compile(rb"direction\.([0-9]{1,9})")
_F32 = 0
"""GGML_TYPE_F32"""
_MAX_DIMS = 4
"""GGML_MAX_DIMS: the number of dimensions of each tensor. Those that a file does not name have the length 1."""
_PROBE_STRENGTHS = (1.0, 1000.0)
"""Standard deviations of the directions of a probe. The second one also shows beside a very large output of a layer."""

Vector = npt.NDArray[np.float32]


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
        for vector in vectors:
            self._add(vector)
        if not np.isfinite(self._sum).all():
            raise ModelError("--control-vector: the directions times their scales are too large for the type F32")

    def _add(self, vector: ScaledFile) -> None:
        path, (first, last) = vector.path, self._layers
        found = _find_directions(path)
        for each in found:
            self._check_size(each, path)
        if not any(first <= each.layer <= last for each in found):
            raise ModelError(
                f"--control-vector-layer-range: {path} has no direction for a layer from {first} to {last}, only for "
                f"those from {min(each.layer for each in found)} to {max(each.layer for each in found)}"
            )
        for each in found:
            values = np.fromfile(path, np.float32, each.n_values, offset=each.offset)
            if len(values) < each.n_values:
                raise ModelError(f"--control-vector: {path} ends inside direction.{each.layer}")
            if not np.isfinite(values).all():
                raise ModelError(f"--control-vector: {path}: direction.{each.layer} has values like NaN")
            with np.errstate(over="ignore", invalid="ignore"):  # the sum is checked
                self._sum[each.layer] += np.float32(vector.scale) * values

    def _check_size(self, direction: _DirectionTensor, path: Path) -> None:
        """Raise `ModelError` if the direction is not for this model. Its values are not read before this check."""
        n_layers, n_embd = self._sum.shape
        if not 0 < direction.layer < n_layers or direction.n_values != n_embd:
            raise ModelError(
                f"--control-vector: {path} is not for this model, which has the layers 0 to {n_layers - 1} and "
                f"{n_embd} dimensions: direction.{direction.layer} has {direction.n_values} dimensions"
            )

    def apply(self, context: Any) -> None:
        """Let a llama_context of the model add the directions from its next batch on.

        Raises:
            EngineError: llama.cpp cannot use them.
        """
        if self._sum.any():
            self._set(context, self._sum)

    def check_effect(self, context: Any, compute: Callable[[], Vector]) -> None:
        """Check that llama.cpp adds directions to the layers of the model, and apply the vectors again.

        For some architectures, llama.cpp accepts a control vector and does not use it. Therefore a token is computed
        with directions of zeros and with random directions in the same layers. An equal result shows that llama.cpp
        does not use them. The vectors themselves may be too small to change a result. If all of them are zero, there is
        nothing to check.

        Args:
            context: Pointer to the llama_context.
            compute: Computes the token with the directions that are applied, and returns its logits or its embedding.

        Raises:
            EngineError: llama.cpp does not use control vectors for this model.
        """
        first, last = self._layers
        n_layers, n_embd = self._sum.shape
        layers = [layer for layer in range(first, min(last + 1, n_layers)) if self._sum[layer].any()]
        if not layers:
            return
        zeros, probe = np.zeros_like(self._sum), np.zeros_like(self._sum)
        probe[layers] = np.random.default_rng(0).standard_normal((len(layers), n_embd), np.float32)
        expected = self._computed_with(zeros, context, compute)
        # A device may compute the same token with another rounding.
        noise = _distance(expected, self._computed_with(zeros, context, compute))
        changes = (
            _distance(expected, self._computed_with((probe * strength).astype(np.float32), context, compute))
            for strength in _PROBE_STRENGTHS
        )
        if not any(change > noise for change in changes):
            raise EngineError(
                "--control-vector: llama.cpp does not use control vectors for the architecture of this model"
            )
        self.apply(context)

    def _computed_with(self, directions: Vector, context: Any, compute: Callable[[], Vector]) -> Vector:
        self._set(context, directions)
        return np.array(compute())

    def _set(self, context: Any, directions: Vector) -> None:
        """Let a llama_context use these directions, those of layer N in row N. Raises `EngineError`."""
        from_layer_1 = directions[1:]
        data = from_layer_1.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        n_embd = from_layer_1.shape[1]
        if llama_cpp.llama_set_adapter_cvec(context, data, from_layer_1.size, n_embd, *self._layers):
            raise EngineError("--control-vector: llama.cpp cannot use the vectors; see its log for the reason")


def _distance(one: Vector, other: Vector) -> float:
    """Return the largest difference of two results. Infinite: only one of them is a number."""
    difference = np.abs(one - other)
    return float(np.nan_to_num(difference, nan=np.inf).max())


class _DirectionTensor(NamedTuple):
    """A direction in a file."""

    layer: int
    n_values: int
    offset: int
    """Where its values begin, in bytes from the beginning of the file."""


def _find_directions(path: Path) -> list[_DirectionTensor]:
    """Return the directions of a file, at least one. Their values may be missing. Raises `ModelError`."""
    library = _declared_library()
    file = library.gguf_init_from_file(str(path).encode(), _GgufInitParams(no_alloc=True, ctx=None))
    if not file:
        raise ModelError(f"--control-vector: llama.cpp cannot read {path}; see its log for the reason")
    try:
        found = [_direction(library, file, index, path) for index in range(library.gguf_get_n_tensors(file))]
    finally:
        library.gguf_free(file)
    if not found:
        raise ModelError(f"--control-vector: {path} has no directions")
    return found


def _direction(library: Any, file: Any, index: int, path: Path) -> _DirectionTensor:
    name: bytes = library.gguf_get_tensor_name(file, index)
    match = _DIRECTION.fullmatch(name)
    n_values, *others = library.gguf_get_tensor_ne(file, index)[:_MAX_DIMS]
    if match is None or library.gguf_get_tensor_type(file, index) != _F32 or others != [1] * (_MAX_DIMS - 1):
        raise ModelError(
            f"--control-vector: {path} is not a control vector: each of its tensors must be a direction.N with numbers "
            f"of the type F32 in one row, and {name.decode(errors='replace')} is not"
        )
    offset = library.gguf_get_data_offset(file) + library.gguf_get_tensor_offset(file, index)
    return _DirectionTensor(int(match[1]), n_values, offset)


class _GgufInitParams(ctypes.Structure):
    """gguf_init_params"""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _declared_library() -> Any:
    """Return ggml's library, with the C types of the functions that read GGUF files."""
    file, index = ctypes.c_void_p, ctypes.c_int64
    return declare(
        {
            "gguf_init_from_file": ([ctypes.c_char_p, _GgufInitParams], file),
            "gguf_free": ([file], None),
            "gguf_get_n_tensors": ([file], ctypes.c_int64),
            "gguf_get_data_offset": ([file], ctypes.c_size_t),
            "gguf_get_tensor_name": ([file, index], ctypes.c_char_p),
            "gguf_get_tensor_type": ([file, index], ctypes.c_int),
            "gguf_get_tensor_offset": ([file, index], ctypes.c_size_t),
            "gguf_get_tensor_ne": ([file, index], ctypes.POINTER(ctypes.c_int64)),
        }
    )
