"""Writes a model of the architecture of BERT with random weights, for embeddings and for reranking.

It reads texts in both directions, so llama.cpp has no memory for it, and computes it in one pass. Its vocabulary has
whole words and single characters, and a text stands between the tokens CLS and SEP.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import closing
from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, PoolingType, TokenType

from llamaq.tools.random_gguf.vocabulary import WORDS

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, BEGIN, SEPARATOR, MASK = range(len(SPECIAL_TOKENS))
WORD_START = "\u2581"  # llama.cpp marks the first piece of a word with it
MORE_WORDS = (
    *("hello", "world", "i", "believe", "meaning", "life", "test", "another", "write", "joke", "machine", "learning"),
    *("paris", "city"),
)
N_EMBD, N_FF, N_HEADS, N_LAYERS = 64, 128, 2, 2


def write_bert(
    path: Path,
    *,
    n_ctx: int = 512,
    pooling: PoolingType | None = PoolingType.CLS,
    has_head: bool = False,
    seed: int = 0,
) -> Path:
    """Write a model and return `path`. Equal arguments give equal bytes.

    Args:
        path: The file.
        n_ctx: Training context in tokens.
        pooling: The pooling that the file asks for. None: none.
        has_head: Whether the model has a classification head, which scores documents.
        seed: Seed of the weights.
    """
    rng = np.random.Generator(np.random.SFC64(seed))
    tokens = _tokens()
    with closing(GGUFWriter(path, "bert")) as writer:
        writer.add_context_length(n_ctx)
        writer.add_block_count(N_LAYERS)
        writer.add_embedding_length(N_EMBD)
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEADS)
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        if pooling is not None:
            writer.add_pooling_type(pooling)
        _add_vocabulary(writer, tokens)
        for name, values in _tensors(rng, len(tokens), n_ctx, has_head=has_head):
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


def _tokens() -> list[str]:
    words = dict.fromkeys([*MORE_WORDS, *WORDS.split(), *string.ascii_lowercase, *string.digits, *string.punctuation])
    return [*SPECIAL_TOKENS, *(WORD_START + word for word in words), *string.ascii_lowercase, *string.digits]


def _add_vocabulary(writer: GGUFWriter, tokens: list[str]) -> None:
    n_special = len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([int(TokenType.CONTROL)] * n_special + [int(TokenType.NORMAL)] * (len(tokens) - n_special))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(SEPARATOR)
    writer.add_sep_token_id(SEPARATOR)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_pad_token_id(PAD)
    writer.add_mask_token_id(MASK)


def _tensors(
    rng: np.random.Generator, n_vocab: int, n_ctx: int, *, has_head: bool
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the tensors with their names in GGUF. Shapes are (outputs, inputs)."""

    def matrix(n_outputs: int, n_inputs: int, std: float = 1.0) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((n_outputs, n_inputs)) * std / sqrt(n_inputs)).astype(np.float32)

    def norm(name: str) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        yield f"{name}.weight", np.ones(N_EMBD, np.float32)
        yield f"{name}.bias", (rng.standard_normal(N_EMBD) * 0.1).astype(np.float32)

    yield "token_embd.weight", matrix(n_vocab, N_EMBD, sqrt(N_EMBD))
    yield "token_types.weight", matrix(2, N_EMBD)
    yield "position_embd.weight", matrix(n_ctx, N_EMBD, sqrt(N_EMBD) / 2)
    yield from norm("token_embd_norm")
    for layer in range(N_LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{block}.{name}.weight", matrix(N_EMBD, N_EMBD, 1.5)
            yield f"{block}.{name}.bias", np.zeros(N_EMBD, np.float32)
        yield from norm(f"{block}.attn_output_norm")
        yield f"{block}.ffn_up.weight", matrix(N_FF, N_EMBD)
        yield f"{block}.ffn_down.weight", matrix(N_EMBD, N_FF)
        yield from norm(f"{block}.layer_output_norm")
    if has_head:
        yield "cls.weight", matrix(N_EMBD, N_EMBD)
        yield "cls.bias", np.zeros(N_EMBD, np.float32)
        yield "cls.output.weight", matrix(1, N_EMBD, 3.0)
        yield "cls.output.bias", np.zeros(1, np.float32)
