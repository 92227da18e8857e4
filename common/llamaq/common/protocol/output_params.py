"""The parameters of a job that determine its output."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from llamaq.common.protocol.chat import TemplateParams
from llamaq.common.protocol.sampling import MAX_TOKEN_ID, SamplingParams
from llamaq.common.protocol.wire_model import JsonObject, refuse_boolean

# Bounds of one request, so that one job cannot cost a worker too much memory or time. The size of the whole request
# is bounded by the setting `max_request_bytes`.
MAX_GENERATED_TOKENS = 1_000_000
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_TOGETHER = 4096
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIASES = 4096
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024
MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 64
MAX_SALT_CHARS = 256
MAX_TAG_CHARS = 64
MAX_INDENTATION = 1000
MAX_ADAPTERS = 64
CONSTRAINTS = ("grammar", "json_schema", "regex", "choice", "lark")
"""The fields of a job that constrain its output."""
GRAMMAR_ROOT_PATTERN = r"^[A-Za-z][A-Za-z0-9\-]{0,63}$"

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
ListedTokenId = Annotated[TokenId, BeforeValidator(refuse_boolean)]
"""A token in an option. `TokenId` is faster: a prompt may have a million of them."""
BAN = -1e9
"""The bias of a token that is never drawn. llama-server writes `false` for it."""
LogitBias = Annotated[float, Field(ge=BAN, le=1e9), BeforeValidator(refuse_boolean)]
LoraScale = Annotated[float, Field(ge=-100, le=100), BeforeValidator(refuse_boolean)]
"""With larger scales, keys and values of usual adapters exceed the range of 16-bit numbers."""
LoraScales = Annotated[dict[str, LoraScale], Field(max_length=MAX_ADAPTERS)]


def _check_n_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(value)} entries are more than {MAX_LOGIT_BIASES}")
    return value


def _with_text_keys(value: Any) -> Any:
    """Return a map whose numbers as keys are texts."""
    if not isinstance(value, dict):
        return value
    return {str(key) if type(key) is int else key: each for key, each in value.items()}


class OutputParams(TemplateParams, SamplingParams):
    """The parameters of a job that determine its output, except its prompt."""

    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_GENERATED_TOKENS,
        description="Maximum number of generated tokens. 0: only the prompt is computed, for `prompt_logprobs` or for "
        "the prefix cache. If not set: up to the context limit of the job.",
    )
    min_tokens: int = Field(
        0,
        ge=0,
        le=MAX_GENERATED_TOKENS,
        description="The job does not end before this number of tokens: end-of-generation tokens and `stop_token_ids` "
        "are masked until then, unless the grammar allows no other token. A stop string that is complete within these "
        "tokens is ignored, and so is a line that is indented less than `n_indent`.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="Seed of the random draws; the result contains it. If not set: submit chooses a random seed.",
    )
    logit_bias: Annotated[dict[ListedTokenId, LogitBias], BeforeValidator(_check_n_biases)] = Field(
        default_factory=dict,
        max_length=MAX_LOGIT_BIASES,
        description="Maps a token id to a number that is added to its logit; -1e9 bans the token.",
    )
    allowed_token_ids: Annotated[tuple[ListedTokenId, ...], Field(fail_fast=True)] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ALLOWED_TOKENS,
        description="The only tokens that may be generated, at most 4096. An end-of-generation token is masked too, "
        "unless the list names it, or the grammar allows no other token.",
    )
    bad_words: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        (),
        max_length=MAX_BAD_WORDS,
        fail_fast=True,
        description="At most 256 texts that are not generated, each of 1 to 256 characters. If the output ends with "
        "all tokens of such a text but the last one, the last one is masked. The same holds for the text after a "
        "space. The same letters in other tokens are not masked.",
    )
    grammar: str | None = Field(
        None,
        description="A grammar in GBNF that constrains the output, at most 64 KiB. "
        "A job has at most one of `grammar`, `json_schema`, `regex`, `choice` and `lark`.",
    )
    grammar_root: Annotated[str, Field(pattern=GRAMMAR_ROOT_PATTERN)] | None = Field(
        None,
        description="Name of the rule that the grammar starts with: a letter and at most 63 letters, digits or `-`. "
        "If not set: the worker's default, `root`.",
    )
    json_schema: JsonObject | None = Field(
        None,
        description="A JSON schema that constrains the output, at most 64 KiB. A keyword that is not supported is an "
        "error.",
    )
    regex: str | None = Field(
        None,
        min_length=1,
        description="A regular expression that the whole output matches, at most 64 KiB. It has the syntax of Rust's "
        "`regex`: no look-around and no back-references.",
    )
    choice: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None,
        min_length=1,
        max_length=MAX_CHOICES,
        fail_fast=True,
        description="At most 1024 texts, together at most 64 KiB. The output is exactly one of them.",
    )
    lark: str | None = Field(
        None,
        min_length=1,
        description="A grammar in the Lark syntax of llguidance that constrains the output, at most 64 KiB.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the natural logarithm of each token's probability, and the same for this number of most "
        "probable alternatives at its position, at most 20. These are the model's own probabilities: sampling "
        "parameters do not change them.",
    )
    post_sampling_probs: bool = Field(
        False,
        description="`logprobs` has the probabilities of the draw, after all samplers. Tokens that the samplers have "
        "removed are no alternatives.",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the natural logarithm of the probability of each token of the prompt after the tokens "
        "before it, and the same for this number of most probable alternatives at its position, at most 20. The whole "
        "prompt is then computed: none of it comes from the prefix cache. A prompt may have 500,000 such numbers.",
    )
    reasoning_budget: int | None = Field(
        None,
        ge=0,
        le=MAX_GENERATED_TOKENS,
        description="Largest number of tokens of reasoning. At this limit the worker ends the reasoning with "
        "`reasoning_close`, and the model answers. If not set: no limit.",
    )
    reasoning_open: str = Field(
        "<think>",
        min_length=1,
        max_length=MAX_TAG_CHARS,
        description="Text before reasoning, for `reasoning_budget`. `llamaq serve` uses the text of the chat template.",
    )
    reasoning_close: str = Field(
        "</think>",
        min_length=1,
        max_length=MAX_TAG_CHARS,
        description="Text after reasoning, for `reasoning_budget`. `llamaq serve` uses the text of the chat template.",
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        (),
        max_length=MAX_STOP_STRINGS,
        fail_fast=True,
        description="Strings that end the job, each of 1 to 256 characters, together at most 4096. The output does not "
        "contain them.",
    )
    include_stop: bool = Field(
        False, description="The output contains the stop string that ended the job. It ends with this string."
    )
    n_indent: int = Field(
        0,
        ge=0,
        le=MAX_INDENTATION,
        description="Apart from its first line, the output ends before a line that begins with fewer spaces and tabs "
        "than this number. For code that belongs into an indented block. 0: no line ends it.",
    )
    stop_token_ids: tuple[ListedTokenId, ...] = Field(
        (),
        max_length=MAX_STOP_TOKENS,
        fail_fast=True,
        description="Tokens that end the job, as end-of-generation tokens do, at most 256. The output does not contain "
        "them.",
    )
    ignore_eos: bool = Field(
        False,
        description="Mask every end-of-generation token that `stop_token_ids` does not name, so that the job continues "
        "to `max_tokens`, or until its grammar allows no other token.",
    )
    special: bool = Field(
        False,
        description="The text contains the texts of control tokens, such as `<|tool_call|>`. Without it, they are left "
        "out. A stop string may be the text of a control token. The output tells where tags that are tokens begin.",
    )
    cache_prompt: bool = Field(
        True, description="Share KV cells with other jobs whose prompts begin with the same tokens."
    )
    cache_salt: str = Field(
        "",
        max_length=MAX_SALT_CHARS,
        description="Only jobs with the same salt share KV cells. The backend sets it, for example to a tenant's id.",
    )
    cache_public: Literal["system"] | Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] = Field(
        0,
        description="Number of tokens at the beginning of the prompt that may be shared across salts, with jobs that "
        "also set `cache_public`. `system` shares the system messages at the beginning of a chat.",
    )
    lora: Annotated[LoraScales, BeforeValidator(_with_text_keys)] | None = Field(
        None,
        description="Scales of the worker's LoRA adapters for this job, by the name of the adapter's file or by its "
        "number (from 0, in the order of `--lora`). Adapters that are not named are off. If not set: the scales of the "
        "worker.",
    )
    draft_max: int | None = Field(
        None,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="Speculation: largest number of tokens that are drafted and verified at once. 0: no tokens are "
        "drafted. The output does not depend on it. If not set, or larger than the setting `draft_max` of the worker, "
        "that setting applies.",
    )

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {self.max_tokens}")
        if (n_chars := sum(map(len, self.stop))) > MAX_STOP_CHARS_TOGETHER:
            raise ValueError(f"stop: {n_chars} characters together are more than {MAX_STOP_CHARS_TOGETHER}")
        constraints = self.constraints
        if len(constraints) > 1:
            raise ValueError(f"{' and '.join(constraints)} exclude each other: give one")
        for name in set(constraints) - {"json_schema"}:
            if len("".join(getattr(self, name)).encode(errors="replace")) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"{name} is larger than {MAX_GRAMMAR_BYTES} bytes")
        return self

    @property
    def constraints(self) -> tuple[str, ...]:
        """The names of the fields that constrain the output: at most one of `CONSTRAINTS`. An empty grammar is none."""
        return tuple(name for name in CONSTRAINTS if getattr(self, name) is not None and getattr(self, name) != "")
