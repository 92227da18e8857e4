"""The calls of llama.cpp that a worker makes, with Python types at the surface and no decisions.

A `Model` owns a llama_model, a `Context` a llama_context with its KV memory and one batch that is filled again for
every decode. Neither is thread-safe. The C arrays of the batch are numpy memory, because ctypes slices cost more than
the calls.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaq.common.errors import EngineError, ModelError
from llamaq.worker.engine import abi_check
from llamaq.worker.engine.llama_log import LogLines

logger = logging.getLogger(__name__)

LLAMA_CPP_PYTHON_VERSION = str(llama_cpp.__version__)
"""Of llama-cpp-python, which names the llama.cpp inside."""
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
SUCCESS, NO_ROOM, INVALID_BATCH = 0, 1, -1  # what llama_decode returns


FlashAttention = Literal["auto", "on", "off"]

_FLASH_ATTENTION: dict[FlashAttention, int] = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is made; counts are tokens unless they say otherwise."""

    n_ctx: int
    """KV cells, shared by all sequences."""
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    """Sequences, at most `n_batch` and at most 256."""
    n_threads: int
    n_threads_batch: int
    kv_unified: bool = True
    """One pool of cells for all sequences; else each has a stream of `n_ctx / n_seq_max`, rounded up to 256, of its own
    and `n_ctx` is made as large as all of them."""
    has_scratch_sequence: bool = True
    """One of the sequences is for moving parts of others about; without it they are saved and loaded whole."""
    flash_attn: FlashAttention = "auto"
    """Whether attention is computed in one pass over the cells; `auto` leaves it to llama.cpp."""
    swa_full: bool = True
    """Sliding-window layers keep what left the window, so that sequences can be cut and shared in the middle."""


class Model:
    """A loaded model."""

    def __init__(self, path: Path, *, n_gpu_layers: int, main_gpu: int | None = None) -> None:
        """Load it; `main_gpu` keeps all of it on that one device. Raises `ModelError`."""
        abi_check.check_abi()
        _route_log()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        if main_gpu is not None:
            if not has_gpu():
                raise ModelError(
                    "--device, --devices: this build of llama.cpp knows no GPU; see CMAKE_ARGS in CONTRIBUTING.md"
                )
            params.split_mode = llama_cpp.LLAMA_SPLIT_MODE_NONE
            params.main_gpu = main_gpu
        if not path.is_file():
            raise ModelError(f"there is no model file {path}")
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelError(f"llama.cpp cannot load {path}; its log says why")
        self._close = weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        if llama_cpp.llama_model_has_encoder(self.pointer) or not llama_cpp.llama_model_has_decoder(self.pointer):
            self.close()
            raise ModelError(f"{path} is no text generator: llamaq runs decoder-only models")

    @property
    def n_ctx_train(self) -> int:
        """The longest context that the model was trained on."""
        return int(llama_cpp.llama_model_n_ctx_train(self.pointer))

    @property
    def n_swa(self) -> int:
        """The window of its sliding-window layers, 0 without such."""
        return int(llama_cpp.llama_model_n_swa(self.pointer))

    @property
    def is_recurrent(self) -> bool:
        """Whether all or some layers keep one state per sequence, which cannot be cut back."""
        return bool(llama_cpp.llama_model_is_recurrent(self.pointer) or llama_cpp.llama_model_is_hybrid(self.pointer))

    @property
    def is_purely_recurrent(self) -> bool:
        """Whether all layers do: there are no KV cells then."""
        return bool(llama_cpp.llama_model_is_recurrent(self.pointer))

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as llama.cpp writes them."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.pointer, buffer, 256)
        return buffer.value.decode(errors="replace")

    @property
    def quantization(self) -> str:
        """The weight format that most tensors have, such as "Q4_K - Medium"."""
        name: bytes | None = llama_cpp.llama_ftype_name(llama_cpp.llama_model_ftype(self.pointer))
        return name.decode() if name else "unknown"

    def close(self) -> None:
        """Free it; contexts must be closed before. May be called twice."""
        self._close()


class Context:
    """KV memory and compute buffers of one worker."""

    def __init__(self, model: Model, options: ContextOptions) -> None:
        """Raises `EngineError` when llama.cpp refuses, mostly for want of memory."""
        if not 1 <= options.n_seq_max <= min(options.n_batch, MAX_SEQUENCES):
            raise EngineError(f"{options.n_seq_max} sequences: must be at most n_batch and {MAX_SEQUENCES}")
        self._model = model  # a context must not outlive its model
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, _context_params(options))
        if not self.pointer:
            raise EngineError(f"llama.cpp cannot make a context with {options}; too little memory? Its log says why")
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
        self.waiting_copies: list[tuple[int, int]] = []
        """Sources and targets of the copies between streams that the next decode makes before it computes."""

    def decode(self) -> int:
        """Run what the batch holds. 0 is success, 1 means no room in KV memory, all else a failure."""
        status: int = llama_cpp.llama_decode(self.pointer, self.batch.struct)
        if status != INVALID_BATCH:
            self.waiting_copies.clear()
        return status

    def logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """The rows that the batch asked for, in its order; a view, valid until the next decode."""
        address = abi_check.get_logits(self.pointer)
        if not address:
            raise EngineError("llama.cpp has no logits for the last batch")
        row_type: Any = ctypes.c_float * (n_rows * self.n_vocab)
        rows: npt.NDArray[np.float32] = np.frombuffer(row_type.from_address(address), np.float32)
        return rows.reshape(n_rows, self.n_vocab)

    def remove(self, seq_id: int, start: int) -> bool:
        """Drop a sequence's cells from position `start` on. True proves nothing: ask `last_position`."""
        return bool(abi_check.seq_rm(self._memory, seq_id, start, -1))

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` have the cells [start, end) of `source` too; recurrent state is shared whole.

        With streams this ends the process: use `copy_stream`.
        """
        abi_check.seq_cp(self._memory, source, target, start, end)

    def copy_stream(self, source: int, target: int) -> None:
        """Copy all of `source`'s stream over that of `target`; positions at once, data at the next decode."""
        self.waiting_copies.append((source, target))
        abi_check.seq_cp(self._memory, source, target, -1, -1)

    def state_size(self, seq_id: int) -> int:
        """How many bytes `write_state` writes."""
        size: int = abi_check.state_size(self.pointer, seq_id)
        return size

    def write_state(self, seq_id: int, address: int, size: int) -> int:
        """Write a sequence's cells to memory. Returns the bytes written, 0 when llama.cpp refuses."""
        written: int = abi_check.state_get(self.pointer, address, size, seq_id)
        return written

    def read_state(self, seq_id: int, address: int, size: int) -> int:
        """Replace a sequence's cells by written ones. Returns the bytes read, 0 when llama.cpp refuses.

        After a refusal the sequence may hold anything: remove it.
        """
        read: int = abi_check.state_set(self.pointer, address, size, seq_id)
        return read

    def first_position(self, seq_id: int) -> int:
        """The lowest position whose cell the sequence holds, -1 when it is empty."""
        position: int = abi_check.seq_pos_min(self._memory, seq_id)
        return position

    def last_position(self, seq_id: int) -> int:
        """The highest position whose cell the sequence holds, -1 when it is empty."""
        position: int = abi_check.seq_pos_max(self._memory, seq_id)
        return position

    def close(self) -> None:
        """Free it; may be called twice."""
        self._close()


def has_gpu() -> bool:
    """Whether this build of llama.cpp can offload layers."""
    return bool(llama_cpp.llama_supports_gpu_offload())


class TokenBatch:
    """A llama_batch over numpy memory, one sequence per token."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._seq_ids = np.zeros(capacity, np.int32)
        self._wants_logits = np.zeros(capacity, np.int8)
        self._n_seq_ids = np.ones(capacity, np.int32)
        addresses = self._seq_ids.ctypes.data + np.arange(capacity, dtype=np.uintp) * 4
        self._seq_id_pointers = addresses
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._n_seq_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=addresses.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            logits=self._wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def __len__(self) -> int:
        return int(self.struct.n_tokens)

    def clear(self) -> None:
        """Forget all tokens."""
        self.struct.n_tokens = 0

    def add_singles(self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int]) -> None:
        """Append one token for each of several sequences; each wants logits."""
        start = len(self)
        end = start + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = positions
        self._seq_ids[start:end] = seq_ids
        self._wants_logits[start:end] = 1
        self.struct.n_tokens = end

    def add_run(self, tokens: Sequence[int], position: int, seq_id: int, *, wants_logits: bool) -> None:
        """Append consecutive tokens of one sequence; logits are those after the last one."""
        start = len(self)
        end = start + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self._seq_ids[start:end] = seq_id
        self._wants_logits[start:end] = 0
        self._wants_logits[end - 1] = wants_logits
        self.struct.n_tokens = end


def _context_params(options: ContextOptions) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options.n_ctx
    params.n_batch = options.n_batch
    params.n_ubatch = options.n_ubatch
    params.n_seq_max = options.n_seq_max
    # By default the compute buffer has room for n_ubatch rows of logits; fewer than n_seq_max ends the process.
    params.n_outputs_max = options.n_seq_max
    params.n_threads = options.n_threads
    params.n_threads_batch = options.n_threads_batch
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    params.no_perf = True
    params.swa_full = options.swa_full
    params.kv_unified = options.kv_unified
    return params


_log_lines = LogLines()


def _log(level: int, text: bytes, _user_data: Any) -> None:
    for line_level, line in _log_lines.add(level, text.decode(errors="replace")):
        logger.log(line_level, "llama.cpp: %s", line)


_log_callback = llama_cpp.llama_log_callback(_log)  # llama.cpp keeps a pointer to it


def _route_log() -> None:
    """Send llama.cpp's log to this module's logger; what it calls info is debug to us."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p())
