"""Wraps the llama.cpp functions that a worker calls. The wrappers have Python types and make no decisions.

A `Model` owns a llama_model. A `Context` owns a llama_context with its KV memory, and one batch that is filled again
for every decode. Neither is thread-safe.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaq.common.errors import EngineError, ModelError
from llamaq.worker.engine import abi_check
from llamaq.worker.engine.log_line_joiner import LogLineJoiner
from llamaq.worker.engine.token_batch import TokenBatch

logger = logging.getLogger(__name__)

LLAMA_CPP_PYTHON_VERSION = str(llama_cpp.__version__)
"""Version of llama-cpp-python, which determines the version of llama.cpp."""
MAX_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp."""
SUCCESS, NO_ROOM, INVALID_BATCH = 0, 1, -1
"""Return values of llama_decode."""

FlashAttention = Literal["auto", "on", "off"]

_FLASH_ATTENTION: dict[FlashAttention, int] = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options of a llama_context. Each field states its unit."""

    n_ctx: int
    """Number of KV cells of all sequences together."""
    n_batch: int
    """Upper bound on the tokens of one decode."""
    n_ubatch: int
    """Upper bound on the tokens of one compute pass. llama.cpp splits a larger batch into several passes."""
    n_seq_max: int
    """Number of sequences, at most `n_batch` and at most 256."""
    n_threads: int
    """Threads for decodes of one token."""
    n_threads_batch: int
    """Threads for decodes of several tokens."""
    kv_unified: bool = True
    """True: all sequences share one pool of cells. False: each sequence has a stream of `n_ctx / n_seq_max` cells,
    rounded up to a multiple of 256, and `n_ctx` is raised to the sum of the streams."""
    has_scratch_sequence: bool = True
    """Whether one sequence is reserved for saving and loading parts of other sequences. Without this scratch sequence,
    sequences are saved and loaded as a whole."""
    flash_attn: FlashAttention = "auto"
    """Whether flash attention is used; `auto` lets llama.cpp choose."""
    swa_full: bool = True
    """Whether sliding-window layers keep the cells that have left the window, so that sequences can be cut and shared
    at any token."""


ALL_LAYERS = 2**31 - 1


class Model:
    """A loaded llama_model. Its memory is freed by `close`, or when this object is garbage-collected.

    Args:
        path: The GGUF file.
        n_gpu_layers: Number of layers to offload to the GPU. A negative number: all.
        main_gpu: The device for the whole model; None lets llama.cpp split the model among all devices.

    Raises:
        EngineError: The installed llama-cpp-python is not supported.
        ModelError: The model cannot be loaded, is not decoder-only, or there is no GPU although `main_gpu` is given.
    """

    def __init__(self, path: Path, *, n_gpu_layers: int, main_gpu: int | None = None) -> None:
        abi_check.check_abi()
        _route_log()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if n_gpu_layers < 0 else n_gpu_layers
        if main_gpu is not None:
            if not has_gpu():
                raise ModelError(
                    "--device, --devices: this build of llama.cpp has no GPU support; see CMAKE_ARGS in CONTRIBUTING.md"
                )
            params.split_mode = llama_cpp.LLAMA_SPLIT_MODE_NONE
            params.main_gpu = main_gpu
        if not path.is_file():
            raise ModelError(f"there is no model file {path}")
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelError(f"llama.cpp cannot load {path}; see its log for the reason")
        self._close = weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        if llama_cpp.llama_model_has_encoder(self.pointer) or not llama_cpp.llama_model_has_decoder(self.pointer):
            self.close()
            raise ModelError(f"{path} is not a text generator: llamaq runs decoder-only models")

    @property
    def n_ctx_train(self) -> int:
        """Length in tokens of the longest context that the model was trained on."""
        return int(llama_cpp.llama_model_n_ctx_train(self.pointer))

    @property
    def n_swa(self) -> int:
        """Window in tokens of the sliding-window layers; 0 if the model has none."""
        return int(llama_cpp.llama_model_n_swa(self.pointer))

    @property
    def is_recurrent(self) -> bool:
        """Whether some or all layers are recurrent. Such layers keep one state per sequence, which cannot be cut."""
        return bool(llama_cpp.llama_model_is_recurrent(self.pointer) or llama_cpp.llama_model_is_hybrid(self.pointer))

    @property
    def is_purely_recurrent(self) -> bool:
        """Whether all layers are recurrent, so that there are no KV cells."""
        return bool(llama_cpp.llama_model_is_recurrent(self.pointer))

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as formatted by llama.cpp."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.pointer, buffer, 256)
        return buffer.value.decode(errors="replace")

    @property
    def quantization(self) -> str:
        """Weight format of most tensors, such as "Q4_K - Medium"."""
        name: bytes | None = llama_cpp.llama_ftype_name(llama_cpp.llama_model_ftype(self.pointer))
        return name.decode() if name else "unknown"

    def close(self) -> None:
        """Free the model. Its contexts must be closed first. May be called twice."""
        self._close()


class Context:
    """A llama_context: KV memory and compute buffers. `close` or the garbage collection of this object frees them.

    Args:
        model: The model, which must not be closed before the context.
        options: The options.

    Raises:
        EngineError: The options are not valid, or llama.cpp cannot create the context, usually for lack of memory.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        # With its default n_outputs_max, llama_init_from_model aborts if n_seq_max > n_batch.
        if not 1 <= options.n_seq_max <= min(options.n_batch, MAX_SEQUENCES):
            raise EngineError(
                f"n_seq_max: {options.n_seq_max} sequences are not possible, only 1 to n_batch ({options.n_batch}), "
                f"and at most {MAX_SEQUENCES}"
            )
        self._model = model  # keeps the model in memory as long as its context
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, _context_params(options))
        if not self.pointer:
            raise EngineError(f"llama.cpp cannot create a context with {options}; see its log for the reason")
        self._close = weakref.finalize(self, llama_cpp.llama_free, self.pointer)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self.n_ctx: int = llama_cpp.llama_n_ctx(self.pointer)
        self.n_batch: int = llama_cpp.llama_n_batch(self.pointer)
        self.n_seq_max: int = llama_cpp.llama_n_seq_max(self.pointer)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model.pointer))
        self.cells_per_sequence: int = llama_cpp.llama_n_ctx_seq(self.pointer)
        self.kv_unified, self.swa_full = options.kv_unified, options.swa_full
        self.has_scratch_sequence = options.has_scratch_sequence
        self.batch = TokenBatch(self.n_batch)
        self.pending_copies: list[tuple[int, int]] = []
        """Pairs (source, target) of sequence ids. The next decode copies these streams before it computes the batch."""

    def decode(self) -> int:
        """Compute the batch with llama_decode.

        Returns:
            The status: `SUCCESS`, `NO_ROOM` if the KV memory has no room for the batch, any other value for a failure.
        """
        status: int = llama_cpp.llama_decode(self.pointer, self.batch.struct)
        if status != INVALID_BATCH:
            self.pending_copies.clear()
        return status

    def logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """Return the logits of the last decode.

        Args:
            n_rows: Number of tokens in the batch for which logits were requested.

        Returns:
            Array of shape (n_rows, n_vocab), with rows in the order of the batch. The array is a view of memory of the
            llama_context and is valid until the next decode.

        Raises:
            EngineError: llama.cpp has no logits.
        """
        address = abi_check.get_logits(self.pointer)
        if not address:
            raise EngineError("llama.cpp has no logits for the last batch")
        row_type: Any = ctypes.c_float * (n_rows * self.n_vocab)
        rows: npt.NDArray[np.float32] = np.frombuffer(row_type.from_address(address), np.float32)
        return rows.reshape(n_rows, self.n_vocab)

    def remove(self, seq_id: int, start: int) -> bool:
        """Remove a sequence's cells from position `start` on. True does not prove success: check `last_position`."""
        return bool(abi_check.seq_rm(self._memory, seq_id, start, -1))

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells [start, end) of `source` to `target` without copying. Recurrent state is copied as a whole.

        With one stream per sequence, llama_memory_seq_cp aborts on a partial copy: use `copy_stream`.
        """
        abi_check.seq_cp(self._memory, source, target, start, end)

    def copy_stream(self, source: int, target: int) -> None:
        """Replace the stream of `target` by a copy of the stream of `source`.

        llama.cpp copies the positions immediately, and the data in the next decode.
        """
        self.pending_copies.append((source, target))
        abi_check.seq_cp(self._memory, source, target, -1, -1)

    def state_size(self, seq_id: int) -> int:
        """Return the number of bytes that `write_state` needs for a sequence."""
        size: int = abi_check.state_size(self.pointer, seq_id)
        return size

    def write_state(self, seq_id: int, address: int, size: int) -> int:
        """Write a sequence's cells to `size` bytes of the caller's memory at `address`.

        Returns:
            The number of bytes written, 0 if llama.cpp fails.
        """
        written: int = abi_check.state_get(self.pointer, address, size, seq_id)
        return written

    def read_state(self, seq_id: int, address: int, size: int) -> int:
        """Replace a sequence's cells by the cells that `write_state` wrote to `size` bytes at `address`.

        Returns:
            The number of bytes read, 0 if llama.cpp fails. After a failure the cells of the sequence are undefined:
            remove them.
        """
        read: int = abi_check.state_set(self.pointer, address, size, seq_id)
        return read

    def first_position(self, seq_id: int) -> int:
        """Return the lowest position of a sequence that is in KV memory, -1 if the sequence is empty."""
        position: int = abi_check.seq_pos_min(self._memory, seq_id)
        return position

    def last_position(self, seq_id: int) -> int:
        """Return the highest position of a sequence that is in KV memory, -1 if the sequence is empty."""
        position: int = abi_check.seq_pos_max(self._memory, seq_id)
        return position

    def close(self) -> None:
        """Free the context. May be called twice."""
        self._close()


def has_gpu() -> bool:
    """Return whether this build of llama.cpp can offload layers to a GPU."""
    return bool(llama_cpp.llama_supports_gpu_offload())


def _context_params(options: ContextOptions) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options.n_ctx
    params.n_batch = options.n_batch
    params.n_ubatch = options.n_ubatch
    params.n_seq_max = options.n_seq_max
    # n_outputs_max is the upper bound on the rows of logits in one decode, by default n_ubatch. llama_init_from_model
    # aborts if n_outputs_max is less than n_seq_max (assertion in llama_context::output_reserve).
    params.n_outputs_max = options.n_seq_max
    params.n_threads = options.n_threads
    params.n_threads_batch = options.n_threads_batch
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    params.no_perf = True
    params.swa_full = options.swa_full
    params.kv_unified = options.kv_unified
    return params


_line_joiner = LogLineJoiner()


def _log(level: int, text: bytes, _user_data: Any) -> None:
    for line_level, line in _line_joiner.add(level, text.decode(errors="replace")):
        logger.log(line_level, "llama.cpp: %s", line)


_log_callback = llama_cpp.llama_log_callback(_log)  # llama.cpp keeps a pointer to the callback


def _route_log() -> None:
    """Send the log of llama.cpp to this module's logger."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p())
