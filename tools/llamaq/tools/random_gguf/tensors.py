"""The tensors of each architecture, and the scales of their random weights.

Names and shapes follow `load_arch_tensors` of each architecture in llama.cpp (src/models/*.cpp). Shapes are written
as (outputs, inputs). The scales ensure these properties at any depth and width:

- Activations stay near 1, and logits have a standard deviation near `LOGIT_STD`.
- The next token depends on the whole context, not only on the last token: attention scores have the standard
  deviation `SHARPNESS`, and attention adds more to the residual stream than the embedding does.
- The best successor of a token is another token, although input and output embeddings are tied: the signs of the
  final norm alternate. If the model counts, the successor is the next token, and only this property and the last one
  hold.
- End tokens are not generated, except after an end token: see `end_axes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import sqrt

import numpy as np
import numpy.typing as npt

from llamaq.tools.random_gguf.model_spec import SSM_STATE_SIZE, ModelSpec

LOGIT_STD = 1.5
SHARPNESS = 2.5  # standard deviation of the attention scores before the softmax
ATTENTION_BRANCH, FEED_FORWARD_BRANCH, RECURRENT_BRANCH = 2.0, 1.0, 0.5  # std of the sum of all layers' outputs
GATED_STD = 0.6  # standard deviation of silu(a)·b for standard normal a and b; that of silu(a) is similar
FINAL_RMS = 2.0  # approximate RMS of the residual stream after the last layer

END_LOGIT_DROP = 32.0  # mean difference between the logits of ordinary tokens and of end tokens
AXIS_STD = 0.9  # absolute value of an embedding on an end axis / standard deviation on the other axes

CONVOLUTION_TAPS = (0.3, 0.4, 0.5, 0.7)  # oldest token first; the squares add up to about 1
SSM_STEP_RANGE = (0.01, 0.2)  # discretization steps of the channels
SSM_DECAY_RANGE = (0.1, 2.0)  # decay rates of the states; a state remembers 1 / (step · rate) tokens, 2 to 1,000


class Role(Enum):
    """Role of a matrix. The role decides which weights have fixed values and are not random."""

    PLAIN = auto()
    EMBEDDING = auto()  # on the end axes, the values of a row depend on the kind of its token
    SUCCESSOR = auto()  # each row is the embedding of the token before; the end axes are those of the token itself
    BRANCH = auto()  # its output is added to the residual stream, with zeros on the end axes


@dataclass(frozen=True)
class Matrix:
    """A matrix of random weights with mean 0, or one for each expert, stored in the weight format of the file."""

    name: str
    shape: tuple[int, ...]
    """Outputs and inputs. If there are experts, their number comes first."""
    std: float
    role: Role = Role.PLAIN


@dataclass(frozen=True)
class Values:
    """A tensor of given values, stored as float32."""

    name: str
    values: npt.NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Tensor = Matrix | Values


def end_axes(spec: ModelSpec) -> int:
    """Return the number of leading coordinates of the residual stream that show whether a token is an end token.

    In these coordinates ("end axes"), ordinary tokens have a positive constant, and end tokens have a negative one. No
    layer changes the coordinates, so they reach the output embedding, where they give ordinary tokens higher logits
    than end tokens. Opening tokens have a small positive constant, so that they are not generated, and so that an
    ordinary token follows them.
    """
    return max(1, spec.n_embd // 32)


def model_tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """Yield every tensor of the model. Input and output embeddings are the same tensor, unless the model counts."""
    embeddings = (spec.n_vocab, spec.n_embd)
    yield Matrix("token_embd.weight", embeddings, _embedding_std(spec), Role.EMBEDDING)
    if spec.counts:
        yield Matrix("output.weight", embeddings, _embedding_std(spec), Role.SUCCESSOR)
    yield Values("output_norm.weight", _output_norm(spec))
    for layer in range(spec.n_layers):
        block = f"blk.{layer}"
        yield _constant(f"{block}.attn_norm.weight", spec.n_embd)
        if spec.is_recurrent(layer):
            yield from _recurrent(block, spec, layer)
        else:
            yield from _attention(block, spec, layer)
        if spec.architecture.has_feed_forward:
            yield from _feed_forward(block, spec, layer)


def _embedding_std(spec: ModelSpec) -> float:
    return 1 / sqrt(spec.n_embd) if spec.architecture.scales_embeddings else 1.0


def _output_norm(spec: ModelSpec) -> npt.NDArray[np.float32]:
    n_axes, embedding_std = end_axes(spec), _embedding_std(spec)
    signs = 1 if spec.counts else np.where(np.arange(spec.n_embd) % 2 == 0, 1, -1)
    norm = np.full(spec.n_embd, signs * LOGIT_STD / (sqrt(spec.n_embd) * embedding_std), np.float32)
    norm[:n_axes] = END_LOGIT_DROP / 2 * FINAL_RMS / (n_axes * AXIS_STD**2 * embedding_std)
    return norm


def _attention(block: str, spec: ModelSpec, layer: int) -> Iterator[Tensor]:
    n_queries, n_keys = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    unit = 1 / sqrt(spec.n_embd)
    normed = spec.architecture.has_qk_norm
    qk_std = unit if normed else sqrt(SHARPNESS) * unit
    yield Matrix(f"{block}.attn_q.weight", (n_queries, spec.n_embd), qk_std)
    yield Matrix(f"{block}.attn_k.weight", (n_keys, spec.n_embd), qk_std)
    yield Matrix(f"{block}.attn_v.weight", (n_keys, spec.n_embd), unit)
    if normed:
        yield _constant(f"{block}.attn_q_norm.weight", spec.head_dim, sqrt(SHARPNESS))
        yield _constant(f"{block}.attn_k_norm.weight", spec.head_dim, sqrt(SHARPNESS))
    yield _branch(f"{block}.attn_output.weight", n_queries, spec, layer, ATTENTION_BRANCH, input_std=1.0)
    if spec.architecture.has_post_norms:
        yield _constant(f"{block}.post_attention_norm.weight", spec.n_embd, _of_layer(spec, layer, ATTENTION_BRANCH))


def _feed_forward(block: str, spec: ModelSpec, layer: int) -> Iterator[Tensor]:
    unit = 1 / sqrt(spec.n_embd)
    experts, suffix = ((spec.n_experts,), "_exps") if spec.n_experts else ((), "")
    yield _constant(f"{block}.ffn_norm.weight", spec.n_embd)
    if spec.n_experts:
        yield Matrix(f"{block}.ffn_gate_inp.weight", (spec.n_experts, spec.n_embd), unit)
    yield Matrix(f"{block}.ffn_gate{suffix}.weight", (*experts, spec.n_ff, spec.n_embd), unit)
    yield Matrix(f"{block}.ffn_up{suffix}.weight", (*experts, spec.n_ff, spec.n_embd), unit)
    down = _branch(f"{block}.ffn_down{suffix}.weight", spec.n_ff, spec, layer, FEED_FORWARD_BRANCH, input_std=GATED_STD)
    yield replace(down, shape=(*experts, *down.shape))
    if spec.architecture.has_post_norms:
        yield _constant(f"{block}.post_ffw_norm.weight", spec.n_embd, _of_layer(spec, layer, FEED_FORWARD_BRANCH))


def _recurrent(block: str, spec: ModelSpec, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a Mamba-1 layer: convolution over four tokens, then a selective scan (arXiv:2312.00752)."""
    n_inner, rank, n_state = spec.ssm_inner_size, spec.ssm_step_rank, SSM_STATE_SIZE
    yield Matrix(f"{block}.ssm_in.weight", (2 * n_inner, spec.n_embd), 1 / sqrt(spec.n_embd))
    yield Values(f"{block}.ssm_conv1d.weight", np.tile(np.array(CONVOLUTION_TAPS, np.float32), (n_inner, 1)))
    yield _constant(f"{block}.ssm_conv1d.bias", n_inner, 0.0)
    yield Matrix(f"{block}.ssm_x.weight", (rank + 2 * n_state, n_inner), 1 / (GATED_STD * sqrt(n_inner)))
    if spec.architecture.has_ssm_norms:
        yield _constant(f"{block}.ssm_dt_norm.weight", rank)
        yield _constant(f"{block}.ssm_b_norm.weight", n_state)
        yield _constant(f"{block}.ssm_c_norm.weight", n_state)
    yield Matrix(f"{block}.ssm_dt.weight", (n_inner, rank), 0.5 / sqrt(rank))
    steps = np.geomspace(*SSM_STEP_RANGE, n_inner)
    yield Values(f"{block}.ssm_dt.bias", np.log(np.expm1(steps)).astype(np.float32))  # step = softplus(bias)
    decays = np.geomspace(*SSM_DECAY_RANGE, n_state)
    yield Values(f"{block}.ssm_a", np.tile(-decays.astype(np.float32), (n_inner, 1)))
    yield _constant(f"{block}.ssm_d", n_inner, 0.5)
    yield _branch(f"{block}.ssm_out.weight", n_inner, spec, layer, RECURRENT_BRANCH, input_std=GATED_STD)


def _branch(name: str, n_inputs: int, spec: ModelSpec, layer: int, total: float, *, input_std: float) -> Matrix:
    std = _of_layer(spec, layer, total) / (input_std * sqrt(n_inputs))
    return Matrix(name, (spec.n_embd, n_inputs), std, Role.BRANCH)


def _of_layer(spec: ModelSpec, layer: int, total: float) -> float:
    """Return the standard deviation of what a layer adds, if all layers together add `total`."""
    return total / sqrt(spec.n_audible_layers) if layer < spec.n_audible_layers else 0.0


def _constant(name: str, n: int, value: float = 1.0) -> Values:
    return Values(name, np.full(n, value, np.float32))
