"""First weights that can look back: without them, looking facts up took far longer to learn than all the rest.

The first layer begins with heads that attend to the tokens one to four places back and write what they read into
subspaces of their own. The second begins with heads that compare the token some places back with the token one place
further back elsewhere, and copy what stands there: "Mia has a" finds the "red" whose third token back is "Mia". All of
it is a formula over random directions; no data goes in, and training is free to change every number. The idea of
beginning with weights that look trained is that of mimetic initialization (Trockman and Kolter, arXiv:2305.09828).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from llamaq.tools.demo_model.model import Block, DemoModel

OFFSETS: Final = (1, 2, 3, 4)
"""How far back the heads of the first layer look, in tokens."""

POSITION_PAIRS: Final = 6
"""Rotary pairs, fastest first, by which a head of the first layer finds its place."""

POSITION_GAIN: Final = 7.0
"""How sharply the heads of the first layer prefer their offset."""

MATCH_GAIN: Final = 1.8
"""How sharply the heads of the second layer prefer the same token."""

READ_GAIN: Final = 0.05
"""How strongly what a head read is added to the residual stream."""

COPY_GAIN: Final = 0.03
"""How strongly the token that was found is added to it, as the next one."""


def directions(rows: int, width: int, away_from: Tensor) -> Tensor:
    """`rows` random orthonormal directions of `width` numbers, orthogonal to the vector `away_from`."""
    basis, _ = torch.linalg.qr(torch.cat([away_from[:, None], torch.randn(width, rows)], dim=1))
    return basis[:, 1:].T.contiguous()


def slow_half(projection: Tensor, gain: float) -> Tensor:
    """The first half of a projection, moved to the rotary pairs that hardly turn: it compares at any distance."""
    half = projection.shape[0] // 2
    return torch.cat([torch.zeros_like(projection[:half]), gain * projection[:half]])


def look_back(block: Block, model: DemoModel, common: Tensor, content: Tensor, subspaces: list[Tensor]) -> None:
    """Make heads of the first layer attend to fixed offsets, by the component that all tokens share."""
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


def match(block: Block, model: DemoModel, content: Tensor, subspaces: list[Tensor]) -> None:
    """Make heads of the second layer find where the same token stands one place further back, and copy from there."""
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
    look_back(model.blk[0], model, common, content, subspaces)
    match(model.blk[1], model, content, subspaces)
