"""LoRA adapters with random weights, and the models that have the changes of an adapter in their own weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

RANK, ALPHA = 4, 8.0
A, B = ".lora_a", ".lora_b"


def write_lora(
    path: Path,
    model: Path,
    *,
    seed: int = 0,
    strength: float = 1,
    architecture: str | None = None,
    invocation_tokens: Sequence[int] = (),
) -> Path:
    """Write an adapter that changes all matrices of the blocks of a model, and return `path`.

    Args:
        path: The file to write.
        model: The model, with F32 weights.
        seed: Seed of the random changes.
        strength: Standard deviation of the changes, divided by that of the weights.
        architecture: The architecture that the file names. None: that of the model.
        invocation_tokens: If any, the file is an activated LoRA.
    """
    reader, rng = GGUFReader(model), np.random.default_rng(seed)
    own = str(reader.fields["general.architecture"].contents())
    with closing(GGUFWriter(path, architecture or own)) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", ALPHA)
        if invocation_tokens:
            key, kinds = "adapter.alora.invocation_tokens", (GGUFValueType.ARRAY, GGUFValueType.UINT32)
            writer.add_key_value(key, list(invocation_tokens), *kinds)
        for tensor in reader.tensors:
            if tensor.data.ndim == 2 and tensor.name.startswith("blk."):
                n_out, n_in = tensor.data.shape
                std = strength * tensor.data.std() * (RANK**0.5 / ALPHA)
                writer.add_tensor(tensor.name + A, rng.standard_normal((RANK, n_in), np.float32))
                writer.add_tensor(tensor.name + B, std * rng.standard_normal((n_out, RANK), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


def write_merged(path: Path, model: Path, lora: Path, scale: float = 1) -> Path:
    """Write the model whose weights are those of `model` changed by an adapter, and return `path`.

    W + scale * alpha / rank * B A, from "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).
    """
    shutil.copyfile(model, path)
    changes = {tensor.name: tensor.data for tensor in GGUFReader(lora).tensors}
    for tensor in GGUFReader(path, "r+").tensors:
        if (a := changes.get(tensor.name + A)) is not None:
            tensor.data[:] += scale * ALPHA / RANK * changes[tensor.name + B] @ a
    return path
