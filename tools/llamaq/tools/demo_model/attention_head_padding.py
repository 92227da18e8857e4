"""Pads attention heads of width 32 with zeros to heads of width 64 that compute the same.

On a CPU with AVX-512, llama.cpp processes 64 F16 numbers per vector step and the remaining numbers one by one
(`GGML_F16_STEP` in ggml's `simd-mappings.h`). With heads of width 32 the vector code is never used, and attention takes
three quarters of a tick. Models in common use have heads of width 64 or more. The padding does not change the result:

- Rotary positions: in a head of width d, pair i turns by an angle of base^(-2i/d) per position. In a head of width 2d,
  pair 2i turns by the same angle. Therefore the pairs of queries and keys are placed in every other pair.
- Scores are divided by the square root of the head's width. Therefore queries are multiplied by the square root of the
  ratio of the two widths.
- Each row of the values must have the same index in its head as the matching column of the output matrix. Zeros follow
  in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

HEAD_WIDTH: Final = 64
"""Width of the attention heads in the file."""


def widen(name: str, weight: Matrix, heads: int) -> Matrix:
    """Return a tensor as it is written to the file: attention tensors widened, all others unchanged.

    Args:
        name: GGUF name of the tensor.
        weight: The trained tensor. Only attention tensors are changed.
        heads: Number of attention heads.
    """
    of_attention: dict[str, Callable[[Matrix], Matrix]] = {
        "attn_q": partial(_widen_queries, heads=heads),
        "attn_k": partial(_spread_pairs, heads=heads),
        "attn_v": partial(_pad_rows, heads=heads),
        "attn_output": lambda output: _pad_rows(output.T, heads).T,
    }
    kind = name.removesuffix(".weight").rpartition(".")[2]
    return of_attention[kind](weight) if kind in of_attention else weight


def _widen_queries(weight: Matrix, heads: int) -> Matrix:
    widening = HEAD_WIDTH * heads / len(weight)
    return _spread_pairs(weight, heads) * np.float32(widening**0.5)


def _spread_pairs(weight: Matrix, heads: int) -> Matrix:
    """Place the rows of queries or keys in every other rotary pair. The two rows of a pair are adjacent."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    spread = np.zeros((heads, HEAD_WIDTH // 2, 2, weight.shape[1]), np.float32)
    spread[:, :: HEAD_WIDTH // 2 // pairs.shape[1]] = pairs
    return spread.reshape(heads * HEAD_WIDTH, -1)


def _pad_rows(weight: Matrix, heads: int) -> Matrix:
    """Add rows of zeros after the rows of each head."""
    rows = weight.reshape(heads, -1, weight.shape[1])
    padded = np.zeros((heads, HEAD_WIDTH, weight.shape[1]), np.float32)
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(heads * HEAD_WIDTH, -1)
