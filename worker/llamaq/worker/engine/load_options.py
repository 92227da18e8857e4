"""How a model is loaded and a context is created: plain options, and their translation for llama.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, Literal

import llama_cpp

from llamaq.common.errors import ModelError
from llamaq.common.protocol.embedding_task import Pooling
from llamaq.worker.engine.ggml_functions import declare
from llamaq.worker.engine.scaled_file import ScaledFile
from llamaq.worker.engine.thread_pool import ThreadOptions
from llamaq.worker.metadata_override import MetadataOverride

FlashAttention = Literal["auto", "on", "off"]
SplitMode = Literal["none", "layer", "row", "tensor"]
LazyMode = Literal["auto", "on", "off"]
Numa = Literal["off", "distribute", "isolate", "numactl"]
ALL_LAYERS = 2**31 - 1

FLASH_ATTENTION: dict[FlashAttention, int] = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_SPLIT_MODES: dict[SplitMode, int] = {
    "none": llama_cpp.LLAMA_SPLIT_MODE_NONE,
    "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
    "row": llama_cpp.LLAMA_SPLIT_MODE_ROW,
    "tensor": llama_cpp.LLAMA_SPLIT_MODE_TENSOR,
}
_LAZY_MODES: dict[LazyMode, int] = {
    "auto": llama_cpp.LLAMA_LAZY_MODE_AUTO,
    "on": llama_cpp.LLAMA_LAZY_MODE_ON,
    "off": llama_cpp.LLAMA_LAZY_MODE_OFF,
}
_NUMA: dict[Numa, int] = {
    "off": llama_cpp.GGML_NUMA_STRATEGY_DISABLED,
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}
_ROPE_SCALING = {
    None: llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
_POOLING = {
    None: llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED,
    Pooling.NONE: llama_cpp.LLAMA_POOLING_TYPE_NONE,
    Pooling.MEAN: llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    Pooling.CLS: llama_cpp.LLAMA_POOLING_TYPE_CLS,
    Pooling.LAST: llama_cpp.LLAMA_POOLING_TYPE_LAST,
    Pooling.RANK: llama_cpp.LLAMA_POOLING_TYPE_RANK,
}
CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which llama_cpp does not name
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
}


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """How positions are scaled, see `RopeSettings`."""

    scaling: str | None = None
    freq_base: float = 0
    freq_scale: float = 0
    orig_ctx: int = 0
    ext_factor: float = -1
    attn_factor: float = -1
    beta_slow: float = -1
    beta_fast: float = -1

    def write_to(self, params: Any) -> None:
        """Write the options to a `llama_context_params`."""
        params.rope_scaling_type = _ROPE_SCALING[self.scaling]
        params.rope_freq_base, params.rope_freq_scale = self.freq_base, self.freq_scale
        params.yarn_orig_ctx = self.orig_ctx
        params.yarn_ext_factor, params.yarn_attn_factor = self.ext_factor, self.attn_factor
        params.yarn_beta_slow, params.yarn_beta_fast = self.beta_slow, self.beta_fast


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of a llama_model."""

    n_gpu_layers: int = -1
    """Number of layers to offload to the GPU. A negative number: all."""
    split_mode: SplitMode = "layer"
    """How several GPUs share the model."""
    main_gpu: int = 0
    """The GPU for the whole model with `none`, for small tensors with `row`."""
    tensor_split: tuple[float, ...] = ()
    """Share of the model for each GPU. Empty: llama.cpp chooses."""
    override_tensor: tuple[str, ...] = ()
    """Buffers of tensors, each as REGEX=BUFFER."""
    override_kv: tuple[MetadataOverride, ...] = ()
    """Values that replace metadata of the model's file."""
    repack: bool = True
    """Whether weights in host memory may be rearranged for faster computation."""
    check_tensors: bool = False
    """Whether a model with invalid weights is refused."""
    use_mmap: bool | None = None
    """Whether the file is mapped into memory. None: llama.cpp chooses."""
    use_mlock: bool = False
    """Whether the model may not be swapped out."""
    use_direct_io: bool = False
    """Whether the file is read without the page cache. Excludes `use_mmap` and `use_mlock`."""
    lazy_mode: LazyMode = "auto"
    """Whether large tensors of which a token needs few rows are read from the mapped file on demand."""
    numa: Numa = "off"
    """How threads and memory are spread over NUMA nodes."""
    lora: tuple[ScaledFile, ...] = ()
    """Adapters with which the contexts of the model compute."""
    control_vectors: tuple[ScaledFile, ...] = ()
    """Control vectors with which they compute."""
    control_vector_layers: tuple[int, ...] = ()
    """The first and the last layer that the control vectors change. Empty: all that their files name."""
    for_embeddings: bool = False
    """Whether the model computes embeddings. Then it need not be able to generate text."""

    def to_params(self) -> tuple[Any, object]:
        """Return a `llama_model_params`, and an object that must be kept until the model is loaded: the params point to
        it.

        Raises:
            ModelError: There are more shares than devices, or a buffer of `override_tensor` is unknown.
        """
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if self.n_gpu_layers < 0 else self.n_gpu_layers
        params.split_mode, params.main_gpu = _SPLIT_MODES[self.split_mode], self.main_gpu
        params.load_mode, params.lazy_mode = self._load_mode, _LAZY_MODES[self.lazy_mode]
        n_devices = llama_cpp.llama_max_devices()
        if len(self.tensor_split) > n_devices:
            raise ModelError(f"--tensor-split: {len(self.tensor_split)} shares, but at most {n_devices} devices")
        shares = (ctypes.c_float * n_devices)(*self.tensor_split)
        if self.tensor_split:
            params.tensor_split = shares
        params.use_extra_bufts, params.check_tensors = self.repack, self.check_tensors
        overrides = _tensor_overrides(self.override_tensor)
        if self.override_tensor:
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        metadata = _metadata_overrides(self.override_kv)
        if self.override_kv:
            params.kv_overrides = metadata
        return params, (shares, overrides, metadata)

    def init_backend(self) -> None:
        """Start llama.cpp's backends, with the strategy for NUMA nodes."""
        llama_cpp.llama_backend_init()
        if self.numa != "off":
            llama_cpp.llama_numa_init(_NUMA[self.numa])

    @property
    def _load_mode(self) -> int:
        if self.use_direct_io:
            return int(llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO)
        if self.use_mmap is None and not self.use_mlock:
            return int(llama_cpp.LLAMA_LOAD_MODE_AUTO)
        if self.use_mmap is False:
            return int(llama_cpp.LLAMA_LOAD_MODE_MLOCK if self.use_mlock else llama_cpp.LLAMA_LOAD_MODE_NONE)
        return int(llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK if self.use_mlock else llama_cpp.LLAMA_LOAD_MODE_MMAP)


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
    threads: ThreadOptions = field(default_factory=ThreadOptions)
    """On which CPUs these threads run, and how they wait."""
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
    cache_type_k: str = "f16"
    """Data type of the keys, one of `CACHE_TYPES`."""
    cache_type_v: str = "f16"
    """Data type of the values, one of `CACHE_TYPES`."""
    kv_offload: bool = True
    """Whether the KV cells are in GPU memory."""
    op_offload: bool = True
    """Whether the GPU computes large batches also for layers in host memory."""
    rope: RopeOptions = field(default_factory=RopeOptions)
    """How positions are scaled."""
    n_logits: int = 0
    """Upper bound on the tokens of one decode that have logits, if it is larger than `n_seq_max`."""
    backend_sampling: bool = False
    """Whether the device finds the largest logits of each row, see `BackendSamplers`. Then a decode may have one row of
    each sequence, so it may have no drafts."""
    embeddings: bool = False
    """Whether the context computes embeddings instead of logits."""
    pooling: Pooling | None = None
    """How the vectors of tokens become an embedding. None: as the model's file says, otherwise not at all."""

    def to_params(self) -> Any:
        """Return a `llama_context_params`."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.n_ctx
        params.n_batch = self.n_batch
        params.n_ubatch = self.n_ubatch
        params.n_seq_max = self.n_seq_max
        # n_outputs_max is the upper bound on the rows of logits in one decode, by default n_ubatch.
        # llama_init_from_model aborts if n_outputs_max is less than n_seq_max (assertion in
        # llama_context::output_reserve).
        params.n_outputs_max = self.n_batch if self.embeddings else max(self.n_seq_max, self.n_logits)
        params.embeddings = self.embeddings
        params.pooling_type = _POOLING[self.pooling]
        params.n_threads = self.n_threads
        params.n_threads_batch = self.n_threads_batch
        params.flash_attn_type = FLASH_ATTENTION[self.flash_attn]
        params.type_k, params.type_v = CACHE_TYPES[self.cache_type_k], CACHE_TYPES[self.cache_type_v]
        params.offload_kqv, params.op_offload = self.kv_offload, self.op_offload
        self.rope.write_to(params)
        params.no_perf = True
        params.swa_full = self.swa_full
        params.kv_unified = self.kv_unified
        return params


def _metadata_overrides(overrides: tuple[MetadataOverride, ...]) -> ctypes.Array[Any]:
    """Return the overrides as an array that ends with an empty key."""
    rows: ctypes.Array[Any] = (llama_cpp.llama_model_kv_override * (len(overrides) + 1))()
    for row, override in zip(rows, overrides, strict=False):
        row.key = override.key.encode()
        match override.value:
            case bool() as value:
                row.tag, row.value.val_bool = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
            case int() as value:
                row.tag, row.value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, value
            case float() as value:
                row.tag, row.value.val_f64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
            case str() as value:
                row.tag, row.value.val_str = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
    return rows


class _TensorOverride(ctypes.Structure):
    """llama_model_tensor_buft_override: tensors whose names match the pattern are stored in the buffer."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def _tensor_overrides(overrides: tuple[str, ...]) -> ctypes.Array[_TensorOverride]:
    """Return the overrides as an array that ends with an empty pattern.

    Raises:
        ModelError: An override is not REGEX=BUFFER, or llama.cpp has no such buffer.
    """
    buffers = _buffer_types() if overrides else {}
    rows = []
    for override in overrides:
        pattern, _, name = override.rpartition("=")
        if not pattern or name not in buffers:
            names = ", ".join(sorted(buffers))
            raise ModelError(f"--override-tensor: {override!r} is not REGEX=BUFFER with one of the buffers {names}")
        rows.append(_TensorOverride(pattern.encode(), buffers[name]))
    return (_TensorOverride * (len(rows) + 1))(*rows)


def _buffer_types() -> dict[str, int]:
    """Return the address of each device's buffer type under its name in llama.cpp, such as `CPU` or `CUDA0`."""
    ggml = declare(
        {
            "ggml_backend_dev_count": ([], ctypes.c_size_t),
            "ggml_backend_dev_get": ([ctypes.c_size_t], ctypes.c_void_p),
            "ggml_backend_dev_buffer_type": ([ctypes.c_void_p], ctypes.c_void_p),
            "ggml_backend_buft_name": ([ctypes.c_void_p], ctypes.c_char_p),
        }
    )
    devices = [ggml.ggml_backend_dev_get(index) for index in range(ggml.ggml_backend_dev_count())]
    types = [ggml.ggml_backend_dev_buffer_type(device) for device in devices]
    return {ggml.ggml_backend_buft_name(buffer).decode(): buffer for buffer in types if buffer}
