"""A worker's settings of the model and the context. They have the names that llama.cpp's own programs use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.embedding_task import Pooling
from llamaq.worker.metadata_override import MetadataOverride

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
UNQUANTIZED_TYPES = frozenset({"f32", "f16", "bf16"})
"""The types of cells whose values are single numbers."""
MAX_INT32 = 2**31 - 1
"""The largest number that llama.cpp can store. ctypes would pass on the lower 32 bits of a larger one."""
MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS of llama.cpp."""
MAX_FLOAT32 = 3.4e38
"""About the largest number that llama.cpp can store as a scale."""
Layer = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
SCALE = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_CACHE_TYPES = ", ".join(f"`{name}`" for name in get_args(CacheType))


def split_commas(value: Any) -> Any:
    """Return the parts of a text that are separated by commas; any other value as it is."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _split_scale(value: str) -> tuple[str, float]:
    """Return the name of the file in FILE or FILE:SCALE, and the scale.

    Raises:
        ValueError: The scale is too large.
    """
    name, _, end = value.rpartition(":")
    if not name or not SCALE.fullmatch(end):
        return value, 1.0
    if abs(scale := float(end)) > MAX_FLOAT32:
        raise ValueError(f"the scale of {name} is too large")
    return name, scale


class ModelSettings(BaseModel):
    """Model and context."""

    model: str | None = Field(
        None, description="Path of a GGUF file, or `hf:OWNER/REPO/FILE.gguf`. If not set: the demo model of llamaq."
    )
    lora: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="LoRA adapters of the model: GGUF files, or `hf:` names as for `model`, separated by commas. "
        "`FILE:SCALE` sets the strength of an adapter, by default 1.",
    )
    control_vector: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Control vectors, which steer what the model writes: GGUF files, or `hf:` names as for `model`, "
        "separated by commas. `FILE:SCALE` sets the strength of a vector, by default 1.",
    )
    control_vector_layer_range: Annotated[tuple[Layer, ...], NoDecode] = Field(
        (),
        description="The first and the last layer that the control vectors change, such as `10,24`. If not set: all "
        "layers that their files name.",
    )
    override_kv: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Values that replace metadata of the model's file: `KEY=TYPE:VALUE`, separated by commas, such as "
        "`tokenizer.ggml.add_bos_token=bool:false`. The types are `int`, `float`, `bool` and `str`.",
    )
    chat_template_file: Path | None = Field(
        None, description="File with a chat template in Jinja, which replaces the template of the model."
    )
    model_sampling: bool = Field(
        True,
        description="Whether the sampling parameters that the model's file recommends (`general.sampling.*`) are "
        "defaults of jobs. A sampling setting of the worker has precedence.",
    )
    n_ctx: int = Field(
        8192,
        ge=64,
        le=MAX_INT32,
        description="Number of KV cells. All slots share them; each token of a job needs one.",
    )
    n_batch: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens in the batch of one tick, at most `n_ctx`. If not set: `n_ctx`, but at "
        "most 2048. With a model that has a sliding window, also at most `n_ubatch`.",
    )
    n_ubatch: int | None = Field(
        None,
        ge=1,
        le=MAX_INT32,
        description="Maximum number of tokens that llama.cpp computes in one step of a batch. If not set: 512, but "
        "with `embeddings` the whole batch.",
    )
    embeddings: bool = Field(
        False,
        description="Compute embeddings of texts, or scores of documents with `pooling` `rank`, and generate no text. "
        "The worker needs a separate queue. A text must fit into one step: `n_batch`, `n_ubatch` and the training "
        "context of the model bound the number of its tokens.",
    )
    pooling: Pooling | None = Field(
        None,
        description="With `embeddings`: how the vectors of a text's tokens become one vector: `none` (each token keeps "
        "its own), `mean`, `cls` (the first), `last` or `rank` (a score, for models that rerank). If not set: as the "
        "model's file says, otherwise `none`.",
    )
    flash_attn: Literal["auto", "on", "off"] = Field(
        "auto", description="Flash attention: `auto`, `on` or `off`. On a CPU, measure which is faster for your load."
    )
    cache_type_k: CacheType = Field(
        "f16", description=f"Data type of the keys in the KV cells: {_CACHE_TYPES}. `q8_0` halves their memory."
    )
    cache_type_v: CacheType = Field(
        "f16",
        description="Data type of the values in the KV cells: a type of `cache_type_k`. Quantized types need flash "
        "attention.",
    )
    swa_full: bool = Field(
        True,
        description="Sliding-window layers keep the cells that have left the window, so that prompts can share any "
        "prefix. Off: less memory, but a prefix is reused only as a whole, and with such a model `kv_unified` is off.",
    )
    kv_unified: bool = Field(
        True,
        description="All sequences share one pool of KV cells. Off: each sequence has an equal part of `n_ctx`.",
    )
    kv_offload: bool = Field(True, description="The KV cells are in GPU memory. Off: in host memory.")
    backend_sampling: bool = Field(
        False,
        description="The GPU finds the 256 largest logits of each token, and only these are copied to host memory. The "
        "output does not change. Jobs that need all logits, such as those with a JSON schema, still get them. Slower "
        "on a CPU. Not possible with `speculation`.",
    )
    warmup: bool = Field(
        True, description="Compute one token before the worker takes jobs, so that the first job does not wait."
    )

    _split_lists = field_validator(
        "lora", "control_vector", "control_vector_layer_range", "override_kv", mode="before"
    )(split_commas)

    @field_validator("lora", "control_vector")
    @classmethod
    def _check_file_scales(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for each in files:
            _split_scale(each)
        return files

    @field_validator("override_kv")
    @classmethod
    def _check_overrides(cls, overrides: tuple[str, ...]) -> tuple[str, ...]:
        keys = [MetadataOverride.parse(each).key for each in overrides]
        if len(set(keys)) != len(keys):
            raise ValueError("--override-kv (LLAMAQ_OVERRIDE_KV): a key is listed twice")
        return overrides

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.batch_budget > self.n_ctx:
            raise ValueError(f"--n-batch (LLAMAQ_N_BATCH): {self.batch_budget} is more than --n-ctx {self.n_ctx}")
        layers = self.control_vector_layer_range
        if layers and not (len(layers) == 2 and layers[0] <= layers[1] and self.control_vector):
            raise ValueError(
                "--control-vector-layer-range (LLAMAQ_CONTROL_VECTOR_LAYER_RANGE): FIRST,LAST is required, such as "
                "10,24, and a --control-vector"
            )
        if self.pooling is not None and not self.embeddings:
            raise ValueError("--pooling (LLAMAQ_POOLING): only a worker with --embeddings pools")
        return self

    @property
    def lora_scales(self) -> tuple[tuple[str, float], ...]:
        """The file or `hf:` name of each adapter, and its scale."""
        return tuple(_split_scale(each) for each in self.lora)

    @property
    def control_vector_scales(self) -> tuple[tuple[str, float], ...]:
        """The file or `hf:` name of each control vector, and its scale."""
        return tuple(_split_scale(each) for each in self.control_vector)

    @property
    def metadata_overrides(self) -> tuple[MetadataOverride, ...]:
        """The values that replace metadata of the model's file."""
        return tuple(map(MetadataOverride.parse, self.override_kv))

    @property
    def batch_budget(self) -> int:
        """Maximum number of tokens in one call of `llama_decode`."""
        return self.n_batch or min(self.n_ctx, 2048)

    @property
    def ubatch_tokens(self) -> int:
        """Maximum number of tokens that llama.cpp computes in one step when it generates text."""
        return self.n_ubatch or 512

    @property
    def embedding_batch_tokens(self) -> int:
        """Maximum number of tokens in a batch of texts, which llama.cpp computes in one step."""
        return min(self.batch_budget, self.n_ubatch or self.batch_budget)

    @property
    def chat_template_text(self) -> str | None:
        """The text of `chat_template_file`.

        Raises:
            InvalidSettings: The file cannot be read.
        """
        if self.chat_template_file is None:
            return None
        try:
            return self.chat_template_file.read_text()
        except (OSError, UnicodeDecodeError) as exc:
            raise InvalidSettings(f"--chat-template-file (LLAMAQ_CHAT_TEMPLATE_FILE): {exc}") from exc


class DeviceSettings(BaseModel):
    """GPUs and memory."""

    n_gpu_layers: int = Field(
        -1, ge=-1, le=MAX_INT32, description="Number of layers that the GPU computes. -1: all layers."
    )
    device: int | None = Field(None, ge=0, description="Index of the only GPU to use. If not set: all GPUs.")
    devices: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="GPU indices, separated by commas. A supervisor starts one worker process for each."
    )
    split_mode: Literal["none", "layer", "row", "tensor"] = Field(
        "layer",
        description="How several GPUs share the model: `layer`: each computes some layers; `tensor` (experimental in "
        "llama.cpp): each computes a part of each matrix and has a part of the KV cells; `row`: the same, without "
        "the KV cells, on devices that can (CUDA cannot); `none`: only `main_gpu` is used.",
    )
    tensor_split: Annotated[tuple[Annotated[float, Field(ge=0)], ...], NoDecode] = Field(
        (), description="Share of the model for each GPU, such as `3,1`. If not set: by their free memory."
    )
    main_gpu: int = Field(
        0,
        ge=0,
        le=MAX_INT32,
        description="Index of the GPU for the whole model with `split_mode` `none`, for small tensors with `row`.",
    )
    override_tensor: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Where tensors are stored: `REGEX=BUFFER`, separated by commas, such as `exps=CPU`. The expression "
        "matches parts of tensor names; the buffer is `CPU` or a device of llama.cpp such as `CUDA0`.",
    )
    cpu_moe: bool = Field(
        False,
        description="With a mixture-of-experts model: the experts of all layers are stored in host memory and computed "
        "by the CPU, so that the rest of a large model fits into GPU memory.",
    )
    n_cpu_moe: int = Field(
        0, ge=0, le=MAX_LAYERS, description="The same as `cpu_moe`, for this number of layers, from the first one on."
    )
    op_offload: bool = Field(
        True,
        description="The GPU also computes large batches for layers in host memory, and copies their weights for it.",
    )
    repack: bool = Field(
        True,
        description="Weights in host memory are rearranged at the start for faster computation, where llama.cpp can. "
        "Off: they stay as they are in the file, and can stay mapped.",
    )
    check_tensors: bool = Field(
        False, description="Refuse a model with invalid weights (NaN, infinity). The start takes longer."
    )
    use_mmap: bool | None = Field(
        None, description="Map the model file into memory instead of reading it. If not set: llama.cpp chooses."
    )
    use_mlock: bool = Field(False, description="Keep the model in memory: the system may not swap it out.")
    use_direct_io: bool = Field(
        False, description="Read the model file without the page cache of the system, where llama.cpp can."
    )
    lazy_mode: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Read tensors of which each token needs few rows, such as embeddings by layer, from the file on "
        "demand: `on`, `off`, or `auto`: those of more than 4 GiB.",
    )
    numa: Literal["off", "distribute", "isolate", "numactl"] = Field(
        "off",
        description="On machines with several NUMA nodes: `distribute`: threads run on all nodes; `isolate`: on the "
        "node of the process; `numactl`: as the program `numactl` says.",
    )

    _split = field_validator("devices", "tensor_split", "override_tensor", mode="before")(split_commas)

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("--devices (LLAMAQ_DEVICES): a device is listed twice")
        if self.use_direct_io and (self.use_mmap or self.use_mlock):
            raise ValueError("--use-direct-io (LLAMAQ_USE_DIRECT_IO) excludes --use-mmap and --use-mlock")
        return self


class RopeSettings(BaseModel):
    """Positions beyond the context that the model was trained on."""

    rope_scaling: Literal["none", "linear", "yarn"] | None = Field(
        None, description="How positions are scaled: `none`, `linear` or `yarn`. If not set: as the model says."
    )
    rope_scale: float | None = Field(
        None, gt=0, description="Factor by which the context becomes longer, such as 4. Excludes `rope_freq_scale`."
    )
    rope_freq_base: float = Field(0, ge=0, description="Base frequency of RoPE. 0: as the model says.")
    rope_freq_scale: float = Field(
        0, ge=0, description="Factor of the frequencies of RoPE: 1 / `rope_scale`. 0: as the model says."
    )
    yarn_orig_ctx: int = Field(
        0, ge=0, le=MAX_INT32, description="Context in tokens that the model was trained on. 0: as the model says."
    )
    yarn_ext_factor: float = Field(-1, description="Mix of extrapolation for YaRN. -1: as the model says.")
    yarn_attn_factor: float = Field(-1, description="Factor of the attention for YaRN. -1: as the model says.")
    yarn_beta_slow: float = Field(-1, description="High correction dimension of YaRN. -1: as the model says.")
    yarn_beta_fast: float = Field(-1, description="Low correction dimension of YaRN. -1: as the model says.")

    @model_validator(mode="after")
    def _check_scales(self) -> Self:
        if self.rope_scale and self.rope_freq_scale:
            raise ValueError("--rope-scale and --rope-freq-scale (its inverse) exclude each other: give one")
        return self

    @property
    def extends_context(self) -> bool:
        """Whether jobs may be longer than the context that the model was trained on."""
        return bool(self.rope_scaling in ("linear", "yarn") or self.rope_scale or self.rope_freq_scale)
