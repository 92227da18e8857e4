"""Initial weights in which some attention heads already recall words from the context.

Without these heads, recall took far longer to learn than all other abilities.

In the first layer, head n (1 to 4) attends to the token n positions back, and writes this token into a separate
subspace of the residual stream. In the second layer, head n compares the token n - 1 positions back at the present
position with the token n positions back at each earlier position. It copies the token of the earlier position where
both are equal. Example with n = 3: at the end of "Mia has a", the token two positions back is "Mia". The head finds an
earlier "red", because the token three positions before "red" is "Mia" too, and copies "red".

The weights are computed from random directions by a formula, without data. Training may change every number.
Weights that resemble trained ones are known as mimetic initialization (Trockman and Kolter, arXiv:2305.09828).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from llamaq.tools.demo_model.model import Block, DemoModel

OFFSETS: Final = (1, 2, 3, 4)
"""Offsets in tokens to which the heads of the first layer attend."""

POSITION_PAIRS: Final = 6
"""Number of rotary pairs with which a head of the first layer finds its offset. They are the fastest pairs."""

POSITION_GAIN: Final = 7.0
"""How sharply the heads of the first layer prefer their offset."""

MATCH_GAIN: Final = 1.8
"""How sharply the heads of the second layer prefer the same token."""

READ_GAIN: Final = 0.05
"""Factor with which a head of the first layer adds the token to the residual stream."""

COPY_GAIN: Final = 0.03
"""Factor with which a head of the second layer adds the copied token to the residual stream."""


def directions(rows: int, width: int, away_from: Tensor) -> Tensor:
    """Return `rows` random orthonormal directions of `width` numbers, orthogonal to the vector `away_from`."""
    basis, _ = torch.linalg.qr(torch.cat([away_from[:, None], torch.randn(width, rows)], dim=1))
    return basis[:, 1:].T.contiguous()


def slow_half(projection: Tensor, gain: float) -> Tensor:
    """Move the first half of a projection to the slow rotary pairs, so that scores hardly depend on the distance."""
    half = projection.shape[0] // 2
    return torch.cat([torch.zeros_like(projection[:half]), gain * projection[:half]])


def set_offset_heads(block: Block, model: DemoModel, common: Tensor, content: Tensor, subspaces: list[Tensor]) -> None:
    """Make heads of the first layer attend to fixed offsets, through the component that all tokens share."""
    size = model.shape.head_width
    strength = math.sqrt(model.shape.width / 2)
    speeds = model.shape.rope_base ** (-torch.arange(0, 2 * POSITION_PAIRS, 2).float() / size)
    for head, offset in enumerate(OFFSETS):
        rows = slice(head * size, (head + 1) * size)
        query, key = torch.zeros(size), torch.zeros(size)
        query[0 : 2 * POSITION_PAIRS : 2] = POSITION_GAIN
        key[0 : 2 * POSITION_PAIRS : 2] = POSITION_GAIN * torch.cos(offset * speeds)
        key[1 : 2 * POSITION_PAIRS : 2] = POSITION_GAIN * torch.sin(offset * speeds)
        block.attn_q.weight[rows] = torch.outer(query, common) / strength
        block.attn_k.weight[rows] = torch.outer(key, common) / strength
        block.attn_v.weight[rows] = content
        block.attn_output.weight[:, rows] = READ_GAIN * subspaces[head].T


def set_matching_heads(block: Block, model: DemoModel, content: Tensor, subspaces: list[Tensor]) -> None:
    """Make heads of the second layer find an earlier position after the same token, and copy the token from there."""
    size = model.shape.head_width
    queries = [content, *subspaces]
    for head in range(len(OFFSETS)):
        rows = slice(head * size, (head + 1) * size)
        block.attn_q.weight[rows] = slow_half(queries[head], MATCH_GAIN)
        block.attn_k.weight[rows] = slow_half(subspaces[head], MATCH_GAIN)
        copied = directions(size, model.shape.width, torch.ones(model.shape.width))
        block.attn_v.weight[rows] = copied
        block.attn_output.weight[:, rows] = COPY_GAIN * copied.T


@torch.no_grad()
def set_initial_weights(model: DemoModel) -> None:
    """Set the embedding's common component and the heads of the first two layers."""
    width, size = model.shape.width, model.shape.head_width
    common = torch.nn.functional.normalize(torch.randn(width), dim=0)
    embedding = model.token_embd.weight
    embedding += common * embedding.norm(dim=1).mean()
    everything = directions((len(OFFSETS) + 1) * size, width, common)
    content, *subspaces = everything.split(size)
    set_offset_heads(model.blk[0], model, common, content, subspaces)
    set_matching_heads(model.blk[1], model, content, subspaces)
