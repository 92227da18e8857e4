"""Attention with heads of 32 numbers, written as heads of 64 that compute the same.

On a CPU with AVX-512 llama.cpp takes 64 numbers of F16 a step and does what is left over one by one (`GGML_F16_STEP` in
ggml's `simd-mappings.h`), so heads of 32 never meet its vector code: attention took three quarters of a tick. Models
in use have heads of 64 and more. The rest is zeros:

- A head of d numbers turns pair i by base^(-2i/d) a position. Among 2d numbers that is the speed of pair 2i, so that
  queries and keys go to every other pair, and turn as they did.
- Scores are divided by the root of the width, so queries are longer by the root of the widening.
- Values only have to be where the output matrix looks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

HEAD_WIDTH: Final = 64
"""Of the heads in the file."""


def widen(name: str, weight: Matrix, heads: int) -> Matrix:
    """A tensor as it is written: those of attention widened, others as they are. `name` is GGUF's."""
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
    """Rows of queries or keys; the pairs that turn together are neighbours."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    spread = np.zeros((heads, HEAD_WIDTH // 2, 2, weight.shape[1]), np.float32)
    spread[:, :: HEAD_WIDTH // 2 // pairs.shape[1]] = pairs
    return spread.reshape(heads * HEAD_WIDTH, -1)


def _pad_rows(weight: Matrix, heads: int) -> Matrix:
    """Rows of values; zeros after those of each head."""
    rows = weight.reshape(heads, -1, weight.shape[1])
    padded = np.zeros((heads, HEAD_WIDTH, weight.shape[1]), np.float32)
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(heads * HEAD_WIDTH, -1)
