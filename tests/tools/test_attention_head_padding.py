"""The padded attention heads of the demo model give the same results as the heads that were trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llamaq.tools.demo_model.attention_head_padding import HEAD_WIDTH, widen

HEADS, WIDTH, ROPE_BASE = 3, 20, 1e6
NARROW = HEAD_WIDTH // 2

Matrix = npt.NDArray[Any]


def rotated(x: Matrix, position: int) -> Matrix:
    """Apply rotary positions to adjacent pairs of each row. Each row is one head."""
    width = x.shape[1]
    angles = position * ROPE_BASE ** -(np.arange(0, width, 2) / width)
    pairs = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.stack((pairs.real, pairs.imag), axis=-1).reshape(x.shape)


def attention(weights: dict[str, Matrix], stream: Matrix) -> Matrix:
    """Return the vector that attention adds to the residual stream at the last position."""

    def heads(name: str, at: int) -> Matrix:
        rows: Matrix = (weights[f"blk.0.attn_{name}.weight"] @ stream[at]).reshape(HEADS, -1)
        return rows

    last = len(stream) - 1
    query = rotated(heads("q", last), last)
    keys = np.stack([rotated(heads("k", at), at) for at in range(len(stream))])
    values = np.stack([heads("v", at) for at in range(len(stream))])
    scores = np.exp(np.einsum("hd,thd->ht", query, keys) / np.sqrt(query.shape[1]))
    mixed = np.einsum("ht,thd->hd", scores / scores.sum(axis=1, keepdims=True), values)
    added: Matrix = weights["blk.0.attn_output.weight"] @ mixed.reshape(-1)
    return added


def random_weights() -> dict[str, Matrix]:
    rng = np.random.default_rng(1)
    shapes = dict.fromkeys("qkv", (HEADS * NARROW, WIDTH)) | {"output": (WIDTH, HEADS * NARROW)}
    return {f"blk.0.attn_{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("length", [1, 2, 700])
def test_wide_heads_attend_like_narrow_heads(length: int) -> None:
    narrow = random_weights()
    wide = {name: widen(name, weight, HEADS) for name, weight in narrow.items()}
    assert wide["blk.0.attn_q.weight"].shape == (HEADS * HEAD_WIDTH, WIDTH)
    assert wide["blk.0.attn_output.weight"].shape == (WIDTH, HEADS * HEAD_WIDTH)
    stream = np.random.default_rng(2).normal(size=(length, WIDTH)).astype(np.float32) / 8
    np.testing.assert_allclose(attention(wide, stream), attention(narrow, stream), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_norm.weight"])
def test_tensors_outside_attention_are_not_changed(name: str) -> None:
    weight = np.ones((4, 4), np.float32)
    assert widen(name, weight, 2) is weight
