"""A job as its producer submits it: the prompt and its parameters.

Producers validate on submit; workers validate again, because anyone may have written to Redis.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from llamaq.common.protocol.wire_model import StrictModel

# Bounds of one request. They keep a single job from costing a worker memory or time out of proportion; the
# size of the whole request is a setting (`max_request_bytes`).
MAX_GENERATED_TOKENS = 1_000_000


MAX_TOKEN_ID = 2**31 - 1


MAX_SEED = 2**63 - 1


MAX_STOP_STRINGS = 16


MAX_STOP_CHARS = 256


MAX_LOGIT_BIASES = 4096


MAX_GRAMMAR_BYTES = 64 * 1024


MAX_MESSAGES = 4096


MAX_SALT_CHARS = 256


QUEUE_PATTERN = r"^[A-Za-z0-9_\-]{1,64}$"


JOB_ID_PATTERN = r"^[A-Za-z0-9_\-]{1,64}\.[0-9]{1,4}\.[0-9a-f]{32}$"


class Priority(StrEnum):
    """Which of a queue's two lines a job stands in; `interactive` is always read first."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


class Message(StrictModel):
    """One message of a chat. Its content is plain text: special tokens in it are never parsed."""

    role: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    content: str


class SamplingParams(StrictModel):
    """How the next token is drawn. `None` takes the worker's default (see `SamplingDefaults`).

    Semantics and order are those of llama.cpp's default sampler chain: logit bias, penalties, grammar, top-k,
    typical-p, top-p, min-p, temperature.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 takes the most probable token."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """How many of the last tokens (prompt and generated) the penalties look at; -1 is all, 0 none."""


class SamplingDefaults(BaseModel):
    """A worker's sampling defaults, used where a job says nothing."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: float = Field(0.8, ge=0, le=100, description="0 is greedy")
    top_k: int = Field(40, ge=0, description="keep the k most probable tokens, 0: all")
    top_p: float = Field(0.95, gt=0, le=1, description="keep the smallest set with this probability, 1: off")
    min_p: float = Field(0.05, ge=0, le=1, description="drop tokens below this share of the best, 0: off")
    typical_p: float = Field(1.0, gt=0, le=1, description="locally typical sampling, 1: off")
    repeat_penalty: float = Field(1.0, gt=0, le=100, description="divide the logits of repeated tokens, 1: off")
    frequency_penalty: float = Field(0.0, ge=-100, le=100, description="subtracted per occurrence")
    presence_penalty: float = Field(0.0, ge=-100, le=100, description="subtracted once for what occurred")
    penalty_last_n: int = Field(64, ge=-1, description="tokens that the penalties look at, -1: all")

    def resolve(self, params: SamplingParams) -> SamplingDefaults:
        """These defaults with what the job itself set put over them."""
        own = {name: getattr(params, name) for name in SamplingDefaults.model_fields}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})


class JobParams(SamplingParams):
    """Everything about a job except its prompt."""

    max_tokens: int = Field(256, ge=1, le=MAX_GENERATED_TOKENS)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Drawn at submit when missing, and returned with the result."""
    logit_bias: dict[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)], Annotated[float, Field(ge=-1e9, le=1e9)]] = Field(
        default_factory=dict, max_length=MAX_LOGIT_BIASES
    )
    grammar: str | None = None
    """GBNF, see llama.cpp's grammars/README.md."""
    grammar_root: str = Field("root", pattern=r"^[A-Za-z][A-Za-z0-9\-]{0,63}$")
    json_schema: dict[str, JsonValue] | None = None
    """Turned into a grammar by the worker. Not together with `grammar`."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        (), max_length=MAX_STOP_STRINGS
    )
    ignore_eos: bool = False
    """Mask every end-of-generation token, so that the job goes on to `max_tokens`."""
    cache_prompt: bool = True
    """Let the prompt share KV cells with equal prefixes of other jobs."""
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS)
    """Jobs share KV cells only with jobs of the same salt: a tenant's id, say, set by the backend."""
    cache_public: Literal["system"] | Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] = 0
    """How much of the prompt's beginning is no secret and is shared with jobs of every salt that say so too: a number
    of tokens, or "system" for the system messages that a chat begins with."""
    slot: int | None = Field(None, ge=0, le=255)
    """Run in this slot and no other; None lets the worker choose."""
    timeout_s: float | None = Field(None, gt=0, le=10**7)
    """Running longer than this ends the job with `deadline`."""
    queue_timeout_s: float | None = Field(None, gt=0, le=10**7)
    """Waiting longer than this ends the job with `deadline` before it starts."""
    priority: Priority = Priority.INTERACTIVE
    stream: bool = True
    """False: no per-token events, the result alone."""
    cancel_on_disconnect: bool = False
    """Cancel the job when it has been without a subscriber for some seconds."""
    idempotency_key: str | None = Field(None, min_length=1, max_length=256)
    """The same key gives the same job instead of a second one, while its result lives."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Kept with the job and returned with its result; llamaq does not look at it."""

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        if self.grammar is not None and self.json_schema is not None:
            raise ValueError("grammar and json_schema exclude each other: give one")
        if self.ignore_eos and self.is_constrained:
            raise ValueError("ignore_eos cannot be used with grammar or json_schema: a grammar ends with an end token")
        if self.grammar is not None and len(self.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        return self

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar, given or made from a JSON schema, restricts the output."""
        return self.grammar is not None or self.json_schema is not None


class JobRequest(JobParams):
    """A generation job: a prompt in exactly one of three forms, and its parameters."""

    prompt: str | None = None
    """Text; BOS is added as the model asks for it, and special tokens in it are parsed."""
    tokens: tuple[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)], ...] | None = None
    """Token ids, taken as they are."""
    messages: tuple[Message, ...] | None = Field(None, max_length=MAX_MESSAGES)
    """A chat, rendered by the model's own template."""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        given = [name for name in ("prompt", "tokens", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, tokens and messages (given: {', '.join(given) or 'none'})")
        if not getattr(self, given[0]) and given[0] != "prompt":
            raise ValueError(f"{given[0]} is empty")
        return self


class JobOptions(TypedDict, total=False):
    """`JobParams` as keyword arguments, for type checkers; a test holds the two together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    max_tokens: int
    seed: int | None
    logit_bias: dict[int, float]
    grammar: str | None
    grammar_root: str
    json_schema: dict[str, Any] | None
    stop: list[str] | tuple[str, ...]
    ignore_eos: bool
    cache_prompt: bool
    cache_salt: str
    cache_public: int | Literal["system"]
    slot: int | None
    timeout_s: float | None
    queue_timeout_s: float | None
    priority: Priority | Literal["interactive", "bulk"]
    stream: bool
    cancel_on_disconnect: bool
    idempotency_key: str | None
    metadata: dict[str, Any]
