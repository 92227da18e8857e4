"""Wraps the llama.cpp functions that a worker calls. The wrappers have Python types and make no decisions.

A `Model` owns a llama_model. A `Context` owns a llama_context with its KV memory, and one batch that is filled again
for every decode. Neither is thread-safe.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaq.common.errors import EngineError, ModelError
from llamaq.common.protocol.embedding_task import Pooling
from llamaq.common.protocol.queue_and_worker_state import LoraScale
from llamaq.worker.engine import fast_calls
from llamaq.worker.engine.abi_check import check_abi
from llamaq.worker.engine.control_vectors import ControlVectors
from llamaq.worker.engine.llama_log import has_gpu, route_log
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.engine.lora_adapters import LoadedAdapters
from llamaq.worker.engine.thread_pool import make_thread_pool
from llamaq.worker.engine.token_batch import TokenBatch
from llamaq.worker.engine.unused_logit_rows import return_unused_rows

LLAMA_CPP_PYTHON_VERSION = str(llama_cpp.__version__)
"""Version of llama-cpp-python, which determines the version of llama.cpp."""
METADATA_BYTES = 512
"""Longest value of the metadata that is read."""
MAX_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp."""
_POOLING_OF = {
    llama_cpp.LLAMA_POOLING_TYPE_NONE: Pooling.NONE,
    llama_cpp.LLAMA_POOLING_TYPE_MEAN: Pooling.MEAN,
    llama_cpp.LLAMA_POOLING_TYPE_CLS: Pooling.CLS,
    llama_cpp.LLAMA_POOLING_TYPE_LAST: Pooling.LAST,
    llama_cpp.LLAMA_POOLING_TYPE_RANK: Pooling.RANK,
}
LOGIT_BYTES = 4
SUCCESS, NO_ROOM, INVALID_BATCH = 0, 1, -1
"""Return values of llama_decode."""


class Model:
    """A loaded llama_model. Its memory is freed by `close`, or when this object is garbage-collected.

    Attributes:
        pointer: The llama_model.
        options: The options.
        n_ctx_train: Length in tokens of the longest context that the model was trained on. Read before there is a
            context: with `yarn` and a scale, `llama_init_from_model` multiplies the value in the llama_model.
        adapters: The adapters that the options name. A `Context` applies them.
        control_vectors: The control vectors that the options name. A `Context` applies them too.

    Args:
        path: The GGUF file.
        options: The options.

    Raises:
        EngineError: The installed llama-cpp-python is not supported.
        ModelError: The model, an adapter or a control vector cannot be loaded, the model is not decoder-only, or an
            option does not fit this machine.
    """

    def __init__(self, path: Path, options: ModelOptions) -> None:
        check_abi()
        route_log()
        options.init_backend()
        if options.split_mode == "none" and not has_gpu():
            raise ModelError(
                "--device, --devices, --split-mode none: this build of llama.cpp has no GPU support; see CMAKE_ARGS in "
                "CONTRIBUTING.md"
            )
        if not path.is_file():
            raise ModelError(f"there is no model file {path}")
        params, kept = options.to_params()
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        del kept
        if not self.pointer:
            raise ModelError(f"llama.cpp cannot load {path}; see its log for the reason")
        self._close = weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        if not self.generates_text and not options.for_embeddings:
            self.close()
            raise ModelError(
                f"{path} is not a text generator: llamaq generates text with decoder-only models (for embeddings, see "
                "--embeddings)"
            )
        self.options = options
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(self.pointer))
        self.adapters = LoadedAdapters(self.pointer, options.lora)
        self.control_vectors = ControlVectors(self.pointer, options.control_vectors, options.control_vector_layers)

    @property
    def lora_scales(self) -> tuple[LoraScale, ...]:
        """The names of the adapters, and their scales."""
        return tuple(LoraScale(name=each.path.name, scale=each.scale) for each in self.options.lora)

    @property
    def n_vocab(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer)))

    @property
    def generates_text(self) -> bool:
        """Whether the model has a decoder and no encoder. llama.cpp says so of a model like BERT too: only a context
        shows that it has no KV memory.
        """
        has_encoder = llama_cpp.llama_model_has_encoder(self.pointer)
        return bool(llama_cpp.llama_model_has_decoder(self.pointer)) and not has_encoder

    @property
    def n_embd(self) -> int:
        """Number of dimensions of an embedding."""
        return int(llama_cpp.llama_model_n_embd_out(self.pointer))

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

    def metadata(self, key: str) -> str | None:
        """Return the value of a key of the model's file as text. None: it has no such key."""
        buffer = ctypes.create_string_buffer(METADATA_BYTES)
        n_bytes = llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), buffer, METADATA_BYTES)
        return buffer.value.decode(errors="replace") if n_bytes >= 0 else None

    def close(self) -> None:
        """Free the model. Its contexts must be closed first. May be called twice."""
        self._close()


class Context:
    """A llama_context: KV memory and compute buffers. `close` or the garbage collection of this object frees them.

    Args:
        model: The model, which must not be closed before the context.
        options: The options.

    Raises:
        EngineError: The options are not valid, or llama.cpp cannot create the context, usually for lack of memory, or
            cannot use the adapters or the control vectors of the model. Or the context is not for embeddings, and
            llama.cpp has no KV memory for the model, for example for a model like BERT.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        # With its default n_outputs_max, llama_init_from_model aborts if n_seq_max > n_batch.
        if not 1 <= options.n_seq_max <= min(options.n_batch, MAX_SEQUENCES):
            raise EngineError(
                f"n_seq_max: {options.n_seq_max} sequences are not possible, only 1 to n_batch ({options.n_batch}), "
                f"and at most {MAX_SEQUENCES}"
            )
        self._model = model  # keeps the model in memory as long as its context
        self._thread_pool = make_thread_pool(options.threads, max(options.n_threads, options.n_threads_batch))
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, options.to_params())
        if not self.pointer:
            raise EngineError(f"llama.cpp cannot create a context with {options}; see its log for the reason")
        self._close = weakref.finalize(self, llama_cpp.llama_free, self.pointer)
        if self._thread_pool is not None:
            self._thread_pool.attach(self.pointer)
        model.adapters.apply(self.pointer)
        model.control_vectors.apply(self.pointer)
        self._adapter_scales: tuple[float, ...] | None = None
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        if not self._memory and not options.embeddings:
            self.close()
            raise EngineError(
                f"--model (or --model-draft): llama.cpp has no KV memory for this model ({model.description}), so it "
                "generates no text; a model for embeddings needs --embeddings"
            )
        self.n_ctx: int = llama_cpp.llama_n_ctx(self.pointer)
        self.n_batch: int = llama_cpp.llama_n_batch(self.pointer)
        self.n_seq_max: int = llama_cpp.llama_n_seq_max(self.pointer)
        self.n_vocab: int = model.n_vocab
        if not options.embeddings and not has_gpu():  # with a GPU, the rows may be in memory that its driver manages
            return_unused_rows(fast_calls.get_logits(self.pointer), self.n_seq_max * self.n_vocab * LOGIT_BYTES)
        self.n_embd = model.n_embd
        self.cells_per_sequence: int = llama_cpp.llama_n_ctx_seq(self.pointer)
        self.kv_unified, self.swa_full = options.kv_unified, options.swa_full
        self.has_scratch_sequence = options.has_scratch_sequence
        self.batch = TokenBatch(self.n_batch)
        self._logits: npt.NDArray[np.float32] = np.empty((0, self.n_vocab), np.float32)
        """A view of llama.cpp's logits. It is kept because making it takes longer than two draws."""
        self._logits_address = 0
        self.pending_copies: list[tuple[int, int]] = []
        """Pairs (source, target) of sequence ids. The next decode copies these streams before it computes the batch."""
        compute_first = self._first_embedding if options.embeddings else self._first_logits
        model.control_vectors.check_effect(self.pointer, compute_first)

    def decode(self) -> int:
        """Compute the batch with llama_decode.

        Returns:
            The status: `SUCCESS`, `NO_ROOM` if the KV memory has no room for the batch, any other value for a failure.
        """
        status: int = llama_cpp.llama_decode(self.pointer, self.batch.struct)
        if status != INVALID_BATCH:
            self.pending_copies.clear()
        return status

    def _first_logits(self) -> npt.NDArray[np.float32]:
        self.compute_first_token(0)
        row: npt.NDArray[np.float32] = self.logits(1)[0]
        return row

    def _first_embedding(self) -> npt.NDArray[np.float32]:
        self.compute_first_token(0)
        return self.token_embeddings(1) if self.pooling is Pooling.NONE else self.sequence_embedding(0)

    def compute_first_token(self, token: int) -> None:
        """Compute a text of one token while there is no sequence. There is none afterwards, and the batch is empty.

        Raises:
            EngineError: llama.cpp cannot compute it.
        """
        self.batch.clear()
        self.batch.add_text([token], 0)
        status = self.decode()
        self.batch.clear()
        self.clear()
        if status != SUCCESS:
            raise EngineError(f"llama.cpp cannot compute a first token (status {status}); see its log for the reason")

    def use_adapters(self, scales: tuple[float, ...] | None) -> None:
        """Use the adapters of the model with these scales from the next decode on.

        Args:
            scales: The scale of each adapter. None: the scales with which the adapters were loaded.

        Raises:
            EngineError: llama.cpp cannot use them.
        """
        if scales != self._adapter_scales:
            self._model.adapters.apply(self.pointer, scales)
            self._adapter_scales = scales

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Change the number of threads from the next decode on.

        Args:
            n_threads: Number of threads for batches of one token, at most as many as in the options.
            n_threads_batch: Number of threads for larger batches, at most as many as in the options.
        """
        llama_cpp.llama_set_n_threads(self.pointer, n_threads, n_threads_batch)

    def place_this_thread(self) -> None:
        """Let the calling thread, which computes the batches, run on the CPUs and with the priority of the options."""
        if self._thread_pool is not None:
            self._thread_pool.place_this_thread()

    def synchronize(self) -> None:
        """Wait until the device has computed the last batch. `logits` waits too."""
        llama_cpp.llama_synchronize(self.pointer)

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
        address = fast_calls.get_logits(self.pointer)
        if not address:
            raise EngineError("llama.cpp has no logits for the last batch")
        if address != self._logits_address or n_rows > len(self._logits):
            row_type: Any = ctypes.c_float * (n_rows * self.n_vocab)
            self._logits = np.frombuffer(row_type.from_address(address), np.float32).reshape(n_rows, self.n_vocab)
            self._logits_address = address
        return self._logits[:n_rows]

    @property
    def pooling(self) -> Pooling:
        """How this context pools the vectors of tokens."""
        return _POOLING_OF[llama_cpp.llama_pooling_type(self.pointer)]

    def token_embeddings(self, n_tokens: int) -> npt.NDArray[np.float32]:
        """Return the embeddings of the last decode, for a context with the pooling `none`.

        Args:
            n_tokens: Number of tokens in the batch.

        Returns:
            Array of shape (n_tokens, n_embd), a view that is valid until the next decode.

        Raises:
            EngineError: llama.cpp has no embeddings.
        """
        rows = _floats_at(fast_calls.get_embeddings(self.pointer), n_tokens * self.n_embd)
        return rows.reshape(n_tokens, self.n_embd)

    def sequence_embedding(self, seq_id: int) -> npt.NDArray[np.float32]:
        """Return the pooled embedding of a sequence of the last decode, or its score with the pooling `rank`.

        Returns:
            Array of shape (n_embd) or (1), a view that is valid until the next decode.

        Raises:
            EngineError: llama.cpp has no embedding of this sequence.
        """
        n_values = 1 if self.pooling is Pooling.RANK else self.n_embd
        return _floats_at(fast_calls.get_embeddings_seq(self.pointer, seq_id), n_values)

    def clear(self, *, with_data: bool = False) -> None:
        """Remove all sequences.

        Args:
            with_data: Whether the data of the cells are overwritten with zeros. This takes longer.
        """
        if self._memory:  # a model like BERT has no memory
            fast_calls.clear_memory(self._memory, with_data)

    def remove(self, seq_id: int, start: int) -> bool:
        """Remove a sequence's cells from position `start` on. True does not prove success: check `last_position`."""
        return bool(fast_calls.seq_rm(self._memory, seq_id, start, -1))

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells [start, end) of `source` to `target` without copying. Recurrent state is copied as a whole.

        With one stream per sequence, llama_memory_seq_cp aborts on a partial copy: use `copy_stream`.
        """
        fast_calls.seq_cp(self._memory, source, target, start, end)

    def copy_stream(self, source: int, target: int) -> None:
        """Replace the stream of `target` by a copy of the stream of `source`.

        llama.cpp copies the positions immediately, and the data in the next decode.
        """
        self.pending_copies.append((source, target))
        fast_calls.seq_cp(self._memory, source, target, -1, -1)

    def state_size(self, seq_id: int) -> int:
        """Return the number of bytes that `write_state` needs for a sequence."""
        size: int = fast_calls.state_size(self.pointer, seq_id)
        return size

    def write_state(self, seq_id: int, address: int, size: int) -> int:
        """Write a sequence's cells to `size` bytes of the caller's memory at `address`.

        Returns:
            The number of bytes written, 0 if llama.cpp fails.
        """
        written: int = fast_calls.state_get(self.pointer, address, size, seq_id)
        return written

    def read_state(self, seq_id: int, address: int, size: int) -> int:
        """Replace a sequence's cells by the cells that `write_state` wrote to `size` bytes at `address`.

        Returns:
            The number of bytes read, 0 if llama.cpp fails. After a failure the cells of the sequence are undefined:
            remove them.
        """
        read: int = fast_calls.state_set(self.pointer, address, size, seq_id)
        return read

    def first_position(self, seq_id: int) -> int:
        """Return the lowest position of a sequence that is in KV memory, -1 if the sequence is empty."""
        position: int = fast_calls.seq_pos_min(self._memory, seq_id)
        return position

    def last_position(self, seq_id: int) -> int:
        """Return the highest position of a sequence that is in KV memory, -1 if the sequence is empty."""
        position: int = fast_calls.seq_pos_max(self._memory, seq_id)
        return position

    def close(self) -> None:
        """Free the context. May be called twice."""
        self._close()


def _floats_at(address: int | None, n_values: int) -> npt.NDArray[np.float32]:
    if not address:
        raise EngineError("llama.cpp has no embeddings for the last batch")
    row_type: Any = ctypes.c_float * n_values
    values: npt.NDArray[np.float32] = np.frombuffer(row_type.from_address(address), np.float32)
    return values
