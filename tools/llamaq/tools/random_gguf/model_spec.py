"""The specification of a random-weight model: architecture, sizes and weight format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

SSM_CONV_KERNEL = 4
SSM_STATE_SIZE = 16
SWA_PERIOD = 2  # every second layer of a sliding-window model attends to the whole context

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Architecture(Enum):
    """An architecture of llama.cpp, by its GGUF name. The comments name the kind of memory that it uses."""

    LLAMA = "llama"  # attention; llama_kv_cache
    QWEN3 = "qwen3"  # attention with norms of queries and keys; llama_kv_cache
    QWEN3MOE = "qwen3moe"  # the same, and each token is computed by some of the experts of a layer; llama_kv_cache
    GEMMA3 = "gemma3"  # sliding windows in every second layer; llama_kv_cache_iswa
    MAMBA = "mamba"  # a recurrent state; llama_memory_recurrent
    JAMBA = "jamba"  # alternating recurrent and attention layers; llama_memory_hybrid

    @property
    def has_qk_norm(self) -> bool:
        return self in (Architecture.QWEN3, Architecture.QWEN3MOE, Architecture.GEMMA3)

    @property
    def has_post_norms(self) -> bool:
        return self is Architecture.GEMMA3

    @property
    def scales_embeddings(self) -> bool:
        """Whether llama.cpp multiplies input embeddings by the square root of their dimension."""
        return self is Architecture.GEMMA3

    @property
    def has_feed_forward(self) -> bool:
        return self is not Architecture.MAMBA

    @property
    def has_recurrence(self) -> bool:
        return self in (Architecture.MAMBA, Architecture.JAMBA)

    @property
    def has_ssm_norms(self) -> bool:
        return self is Architecture.JAMBA


class Weights(Enum):
    """Format of the matrices. Norms, biases and state-space parameters are always float32."""

    F32 = "F32"
    F16 = "F16"
    Q8_0 = "Q8_0"


@dataclass(frozen=True)
class ModelSpec:
    """Architecture and sizes of a model with tied input and output embeddings, unless it `counts`.

    Attributes:
        n_silent_layers: Number of last layers that add nothing: they cost time, and change no logit. A model without
            them has the same logits, and the same weights if the seed is equal. So it is a draft model whose tokens are
            all accepted.
        counts: Whether the most probable token after token t is t + 1. So a benchmark knows what the model writes. All
            layers are silent, and the output embedding is the input embedding of the token before.
        n_experts: Number of feed-forward experts of a layer of `QWEN3MOE`; 0 for all other architectures.
        n_experts_used: Number of experts that compute a token.
        n_ctx: Training context in tokens.
        n_swa: Sliding window of `GEMMA3` in tokens; 0 for all other architectures.
        sampling: Recommended sampling parameters: keys after `general.sampling.`, and values.
        control_tags: Texts of further control tokens, such as `[TOOL_CALLS]`.
        user_defined_tags: Texts of user-defined tokens, such as `<think>`.

    Raises:
        ValueError: The sizes do not fit together.
    """

    architecture: Architecture
    n_layers: int = 2
    n_silent_layers: int = 0
    counts: bool = False
    n_embd: int = 64
    n_ff: int = 128
    n_experts: int = 0
    n_experts_used: int = 2
    n_heads: int = 2
    n_kv_heads: int = 2
    head_dim: int = 32
    n_ctx: int = 4096
    n_vocab: int = 512
    n_swa: int = 0
    weights: Weights = Weights.F32
    chat_template: str | None = None
    sampling: tuple[tuple[str, str], ...] = ()
    control_tags: tuple[str, ...] = ()
    user_defined_tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.n_embd % 32 or self.n_ff % 32 or self.head_dim % 32:
            raise ValueError(f"n_embd, n_ff and head_dim must be multiples of 32, the block of Q8_0: {self}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads: {self}")
        if not 0 <= self.n_silent_layers < self.n_layers:
            raise ValueError(f"at least one layer must not be silent: {self}")
        if (self.architecture is Architecture.GEMMA3) != (self.n_swa > 0):
            raise ValueError(f"n_swa must be set for {Architecture.GEMMA3.value}, and for no other: {self}")
        if (self.architecture is Architecture.QWEN3MOE) != (self.n_experts > 0):
            raise ValueError(f"n_experts must be set for {Architecture.QWEN3MOE.value}, and for no other: {self}")
        if self.architecture is Architecture.JAMBA and self.n_heads * self.head_dim != self.n_embd:
            raise ValueError(f"{Architecture.JAMBA.value} needs n_heads times head_dim to be n_embd: {self}")

    @property
    def n_audible_layers(self) -> int:
        return 0 if self.counts else self.n_layers - self.n_silent_layers

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer is recurrent: all layers of `MAMBA`; the first, third, fifth, … of `JAMBA`."""
        return self.architecture is Architecture.MAMBA or (self.architecture is Architecture.JAMBA and layer % 2 == 0)

    @property
    def ssm_inner_size(self) -> int:
        return 2 * self.n_embd  # llama.cpp accepts no other expansion factor for Mamba-1

    @property
    def ssm_step_rank(self) -> int:
        return self.n_embd // 16


PLAIN = ModelSpec(Architecture.LLAMA)
GROUPED = ModelSpec(Architecture.QWEN3, n_heads=4, n_kv_heads=2)
SLIDING = ModelSpec(Architecture.GEMMA3, n_swa=64)
RECURRENT = ModelSpec(Architecture.MAMBA)
HYBRID = ModelSpec(Architecture.JAMBA)
# All experts compute each token. Otherwise rounding, which depends on the shape of a batch, could choose other experts.
EXPERTS = ModelSpec(Architecture.QWEN3MOE, n_ff=64, n_experts=4, n_experts_used=4)
MEMORY_KINDS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "plain": PLAIN,
        "grouped": GROUPED,
        "experts": EXPERTS,
        "sliding": SLIDING,
        "recurrent": RECURRENT,
        "hybrid": HYBRID,
    }
)
