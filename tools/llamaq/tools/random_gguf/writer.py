"""Writes the GGUF file: metadata, vocabulary, then one tensor after the other, so that memory holds only one tensor.

Matrices are drawn as 8-bit integers ("steps") and then encoded. In Q8_0 the steps are the stored values, with one
scale for the whole matrix. So no weights need to be quantized, and a file with 600 million weights is written within
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from llamaq.tools.random_gguf.model_spec import (
    SSM_CONV_KERNEL,
    SSM_STATE_SIZE,
    SWA_PERIOD,
    Architecture,
    ModelSpec,
    Weights,
)
from llamaq.tools.random_gguf.tensors import AXIS_STD, Matrix, Role, Tensor, Values, end_axes, model_tensors
from llamaq.tools.random_gguf.vocabulary import BOS, EOS, TURN_END, Vocabulary, byte_level_vocabulary

REVISION = 1
"""Part of cache keys. Increment the number with every change after which the same spec and seed give another file."""

MAX_STEP = 127  # steps are uniform from -MAX_STEP to MAX_STEP, the range of symmetric 8-bit quantization
STEP_STD = math.sqrt(((2 * MAX_STEP + 1) ** 2 - 1) / 12)
OPENING_FRACTION = 4  # on the end axes, the value of ordinary tokens divided by that of opening tokens
Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", (32,))])  # block_q8_0 of ggml-common.h

Steps = npt.NDArray[np.int8]

_TENSOR_TYPE = {
    Weights.F32: GGMLQuantizationType.F32,
    Weights.F16: GGMLQuantizationType.F16,
    Weights.Q8_0: GGMLQuantizationType.Q8_0,
}
_FILE_TYPE = {
    Weights.F32: LlamaFileType.ALL_F32,
    Weights.F16: LlamaFileType.MOSTLY_F16,
    Weights.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


def write_model(path: Path, spec: ModelSpec, *, seed: int = 0) -> Path:
    """Write a model and return `path`. Equal specs and seeds give equal bytes.

    The file is written under a temporary name and renamed when it is complete. Missing parent folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        _write(part, spec, np.random.Generator(np.random.SFC64(seed)))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _write(path: Path, spec: ModelSpec, rng: np.random.Generator) -> None:
    tags = [(text, TokenType.CONTROL) for text in spec.control_tags]
    tags += [(text, TokenType.USER_DEFINED) for text in spec.user_defined_tags]
    vocabulary = byte_level_vocabulary(spec.n_vocab, tuple(tags))
    tensors = list(model_tensors(spec))
    with closing(GGUFWriter(path, spec.architecture.value)) as writer:
        _add_metadata(writer, spec)
        _add_vocabulary(writer, spec, vocabulary)
        for tensor in tensors:
            _add_tensor_info(writer, tensor, spec.weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data in _data(tensors, spec, vocabulary, rng):
            writer.write_tensor_data(data)


def _add_metadata(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_name(f"random {spec.architecture.value}")
    writer.add_file_type(_FILE_TYPE[spec.weights])
    writer.add_context_length(spec.n_ctx)
    writer.add_block_count(spec.n_layers)
    writer.add_embedding_length(spec.n_embd)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_feed_forward_length(spec.n_ff if spec.architecture.has_feed_forward else 0)
    if spec.n_experts:
        writer.add_expert_count(spec.n_experts)
        writer.add_expert_used_count(spec.n_experts_used)
        writer.add_expert_feed_forward_length(spec.n_ff)
    if spec.architecture is Architecture.MAMBA:
        writer.add_head_count(0)
    else:
        _add_attention(writer, spec)
    if spec.architecture.has_recurrence:
        writer.add_ssm_conv_kernel(SSM_CONV_KERNEL)
        writer.add_ssm_state_size(SSM_STATE_SIZE)
        writer.add_ssm_inner_size(spec.ssm_inner_size)
        writer.add_ssm_time_step_rank(spec.ssm_step_rank)


def _add_attention(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv([0 if spec.is_recurrent(layer) else spec.n_kv_heads for layer in range(spec.n_layers)])
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    if spec.n_swa:
        writer.add_sliding_window(spec.n_swa)
        writer.add_sliding_window_pattern(SWA_PERIOD)


def _add_vocabulary(writer: GGUFWriter, spec: ModelSpec, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.id_of(BOS))
    writer.add_eos_token_id(vocabulary.id_of(EOS))
    writer.add_eot_token_id(vocabulary.id_of(TURN_END))
    writer.add_pad_token_id(vocabulary.id_of(EOS))
    writer.add_add_bos_token(True)
    for key, value in spec.sampling:
        writer.add_string(f"general.sampling.{key}", value)
    if spec.chat_template is not None:
        writer.add_chat_template(spec.chat_template)


def _add_tensor_info(writer: GGUFWriter, tensor: Tensor, weights: Weights) -> None:
    kind = _TENSOR_TYPE[weights] if isinstance(tensor, Matrix) else GGMLQuantizationType.F32
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    n_bytes = math.prod(tensor.shape) // block_size * block_bytes
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)


def _data(
    tensors: Iterable[Tensor], spec: ModelSpec, vocabulary: Vocabulary, rng: np.random.Generator
) -> Iterator[npt.NDArray[Any]]:
    """Yield the values of each tensor, as they are stored."""
    embedding: Steps | None = None
    for tensor in tensors:
        if isinstance(tensor, Values):
            yield tensor.values
            continue
        steps = _steps(tensor, spec, vocabulary, rng, embedding)
        if tensor.role is Role.EMBEDDING:
            embedding = steps
        yield _encode(steps, tensor.std / STEP_STD, spec.weights)


def _steps(
    matrix: Matrix, spec: ModelSpec, vocabulary: Vocabulary, rng: np.random.Generator, embedding: Steps | None
) -> Steps:
    """Return the values of a matrix in units of its scale. `embedding` has those of the input embedding."""
    if matrix.role is Role.SUCCESSOR and embedding is not None:
        steps: Steps = np.roll(embedding, 1, axis=0)
    else:
        steps = rng.integers(-MAX_STEP, MAX_STEP, matrix.shape, np.int8, endpoint=True)
    if matrix.role is Role.BRANCH:
        steps[..., : end_axes(spec), :] = 0
    elif matrix.role in (Role.EMBEDDING, Role.SUCCESSOR):
        _set_end_axes(steps[:, : end_axes(spec)], vocabulary)
    return steps


def _set_end_axes(axes: Steps, vocabulary: Vocabulary) -> None:
    length = round(AXIS_STD * STEP_STD)
    axes[:] = length
    axes[vocabulary.opening_ids] = length // OPENING_FRACTION
    axes[vocabulary.end_ids] = -length


def _encode(steps: Steps, scale: float, weights: Weights) -> npt.NDArray[Any]:
    if weights is Weights.Q8_0:
        blocks = np.empty((*steps.shape[:-1], steps.shape[-1] // 32), Q8_0_BLOCK)
        blocks["scale"] = scale
        blocks["quants"] = steps.reshape(*blocks.shape, 32)
        return blocks
    return (steps * np.float32(scale)).astype(np.float32 if weights is Weights.F32 else np.float16)
