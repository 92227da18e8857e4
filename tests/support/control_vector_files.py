"""Control vectors with random directions, and the models that add the same directions by a bias."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFWriter

Directions = Mapping[int, npt.NDArray[np.float32]]
"""What is added to the output of layers, by the layer."""
INTERNAL_FIELDS = ("GGUF.", "general.architecture")
"""Fields that GGUFWriter writes by itself."""


def draw_directions(model: Path, *layers: int, seed: int = 0) -> Directions:
    """Return a random direction for each of these layers of a model."""
    reader, rng = GGUFReader(model), np.random.default_rng(seed)
    n_embd = next(int(tensor.shape[0]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return {layer: rng.standard_normal(n_embd, np.float32) for layer in layers}


def write_control_vector(path: Path, directions: Mapping[Any, npt.NDArray[Any]]) -> Path:
    """Write a control vector with a direction for each layer, and return `path`. A text is the name of a tensor."""
    with closing(GGUFWriter(path, "controlvector")) as writer:
        for layer, direction in directions.items():
            writer.add_tensor(f"direction.{layer}" if isinstance(layer, int) else layer, direction)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


def write_biased(path: Path, model: Path, directions: Directions, scale: float = 1) -> Path:
    """Write a Llama model that adds the directions to the output of its layers, and return `path`.

    The output of a layer is the sum of what enters its feed-forward network and what the network returns. So the bias
    of the network's last matrix adds to the output of the layer.
    """
    reader = GGUFReader(model)
    architecture = str(reader.fields["general.architecture"].contents())
    with closing(GGUFWriter(path, architecture)) as writer:
        for field in reader.fields.values():
            if not field.name.startswith(INTERNAL_FIELDS):
                writer.add_key_value(field.name, field.contents(), *field.types[:2])
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data)
        for layer, direction in directions.items():
            writer.add_tensor(f"blk.{layer}.ffn_down.bias", np.float32(scale) * direction)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path
