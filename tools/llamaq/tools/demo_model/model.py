"""The llama architecture in PyTorch. Names of the parts follow GGUF, so that the export needs no translation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. The export writes them to the GGUF metadata."""

    vocabulary: int = 2048
    width: int = 192
    layers: int = 5
    heads: int = 6
    feed_forward: int = 512
    context: int = 2048
    rope_base: float = 1e6
    norm_epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


def rope_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each of shape (context, head_width / 2)."""
    exponents = torch.arange(0, shape.head_width, 2).float() / shape.head_width
    angles = torch.outer(torch.arange(shape.context).float(), shape.rope_base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to adjacent pairs, as in the first LLaMA code and LLAMA_ROPE_TYPE_NORM of llama.cpp.

    With adjacent pairs, the weights need no permutation on export.

    Args:
        x: Queries or keys of shape (batch, heads, length, head_width).
        cosines: First value of `rope_tables`, cut to `length` rows.
        sines: Second value of `rope_tables`, cut to `length` rows.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMS norm and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        width, hidden = shape.width, shape.feed_forward
        self.attn_norm = nn.RMSNorm(width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, width, bias=False)
        self.attn_v = nn.Linear(width, width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=shape.norm_epsilon)
        self.ffn_gate = nn.Linear(width, hidden, bias=False)
        self.ffn_up = nn.Linear(width, hidden, bias=False)
        self.ffn_down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output of attention.

        `mask` has the shape (batch, 1, length, length) and is true where a token attends. Without a mask, a token
        attends to itself and to all earlier tokens.
        """
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query = rotate(self.attn_q(x).view(split).transpose(1, 2), cosines, sines)
        key = rotate(self.attn_k(x).view(split).transpose(1, 2), cosines, sines)
        value = self.attn_v(x).view(split).transpose(1, 2)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        mixed: Tensor = self.attn_output(out.transpose(1, 2).reshape(batch, length, width))
        return mixed

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor | None) -> Tensor:
        """Return the residual stream after this block. Input and output have the shape (batch, length, width)."""
        x = x + self.attend(self.attn_norm(x), cosines, sines, mask)
        y = self.ffn_norm(x)
        out: Tensor = x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))
        return out


class DemoModel(nn.Module):
    """The model, which computes logits from token ids. The output matrix is the embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        cosines, sines = rope_tables(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        self.apply(self._initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits of shape (batch, length, vocabulary) for `ids` of shape (batch, length)."""
        length = ids.shape[1]
        cosines, sines = self.get_buffer("cosines")[:length], self.get_buffer("sines")[:length]
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, cosines, sines, mask)
        return functional.linear(self.output_norm(x), self.token_embd.weight)
