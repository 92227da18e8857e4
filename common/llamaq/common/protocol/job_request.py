"""A job as its producer submits it: the prompt and the parameters.

The producer validates a request on submit. The worker validates it again, because other clients of Redis can also
write requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, ValidationError, WrapValidator, model_validator

from llamaq.common.protocol.chat import Message, TemplateParams
from llamaq.common.protocol.embedding_task import EmbeddingTask, JobKind
from llamaq.common.protocol.sampling import MAX_TOKEN_ID, SamplingDefaults, SamplingParams
from llamaq.common.protocol.wire_model import JsonObject

# Bounds of one request, so that one job cannot cost a worker too much memory or time. The size of the whole request
# is bounded by the setting `max_request_bytes`.
MAX_GENERATED_TOKENS = 1_000_000
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIASES = 4096
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024
MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 64
CONSTRAINTS = ("grammar", "json_schema", "regex", "choice", "lark")
"""The fields of a job that constrain its output."""
GRAMMAR_ROOT_PATTERN = r"^[A-Za-z][A-Za-z0-9\-]{0,63}$"
MAX_MESSAGES = 4096
MAX_SALT_CHARS = 256
MAX_RETRIES = 100
MAX_TAG_CHARS = 64
MAX_ADAPTERS = 64
TENANT_PATTERN = r"^[A-Za-z0-9_.:@/+=\-]{1,128}$"

EMBEDDING_OPTIONS = frozenset({
    "priority", "tenant", "timeout_s", "queue_timeout_s", "deadline_s", "delay_s", "run_at", "retries", "stream",
    "cancel_on_disconnect", "idempotency_key", "traceparent", "metadata", "seed", "has_random_seed", "cache_salt",
})  # fmt: skip
"""The options that an embedding job may have. Its seed and its salt have no effect: it draws and shares nothing."""

MAX_PARTITIONS = 1024
"""Largest number of partitions of a queue."""
QUEUE_PATTERN = r"^[A-Za-z0-9_\-]{1,64}$"
TRACEPARENT_PATTERN = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
JOB_ID_PATTERN = r"^[A-Za-z0-9_\-]{1,64}\.[0-9]{1,4}\.[0-9a-f]{32}$"

SLICE_TOKENS = 8192
"""Long prompts of token ids are validated and encoded in slices. A thread cannot be interrupted within a slice."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
LoraScales = Annotated[dict[str, Annotated[float, Field(ge=-1e4, le=1e4)]], Field(max_length=MAX_ADAPTERS)]


class Priority(StrEnum):
    """The priority of a job. Each priority has a stream; a worker reads interactive jobs before bulk jobs."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


def _seconds_since_epoch(value: Any) -> Any:
    """Return a time as seconds since the epoch, if it is a `datetime` or a text in the form of ISO 8601."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return value  # perhaps a number
    if not isinstance(value, datetime):
        return value
    if value.utcoffset() is None:
        raise ValueError("a time without a time zone is ambiguous: add an offset from UTC, such as +00:00")
    return value.timestamp()


def _check_n_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(value)} entries are more than {MAX_LOGIT_BIASES}")
    return value


def _with_text_keys(value: Any) -> Any:
    """Return a map whose numbers as keys are texts."""
    if not isinstance(value, dict):
        return value
    return {str(key) if type(key) is int else key: each for key, each in value.items()}


class JobParams(TemplateParams, SamplingParams):
    """All parameters of a job except its prompt."""

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
        "are masked until then, unless the grammar allows no other token, and a stop string that is complete within "
        "these tokens is ignored.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="Seed of the random draws; the result contains it. If not set: submit chooses a random seed.",
    )
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-1e9, le=1e9)]], BeforeValidator(_check_n_biases)] = (
        Field(
            default_factory=dict,
            max_length=MAX_LOGIT_BIASES,
            description="Maps a token id to a number that is added to its logit.",
        )
    )
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True)] | None = Field(
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
        description="Strings that end the job, each of 1 to 256 characters. The output does not contain them.",
    )
    include_stop_str_in_output: bool = Field(
        False, description="The output contains the stop string that ended the job. It ends with this string."
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
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
    slot: int | None = Field(
        None, ge=0, le=255, description="Index of the only slot that may run the job. If not set, the worker chooses."
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Longest time in a slot in seconds, summed over all attempts. After this time the job ends with "
        "`deadline`. Waiting does not count. If not set: no limit.",
    )
    queue_timeout_s: float | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Longest wait for the first slot in seconds, from submit or from the later time of `delay_s` or "
        "`run_at`. After this time the job ends with `deadline` without a start. If not set: no limit.",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Longest time from submit to the end in seconds, waiting included. After this time the job ends "
        "with `deadline` and the output so far. If not set: no limit.",
    )
    delay_s: float | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Run the job this many seconds after the submit or later. If not set: at once.",
    )
    run_at: Annotated[float, Field(ge=0, le=10**11), BeforeValidator(_seconds_since_epoch)] | None = Field(
        None,
        description="Run the job at this time or later, by the clock of Redis: a `datetime` with a time zone, a text "
        "in the form of ISO 8601 with an offset from UTC, or seconds since the epoch. Excludes `delay_s`.",
    )
    retries: int = Field(
        0,
        ge=0,
        le=MAX_RETRIES,
        description="How often the job is tried again after the errors `internal` and `decode_failed`. The "
        "delay doubles with each retry (`--retry-s`). The job continues after its last token. After the last retry it "
        "fails and is a dead letter.",
    )
    priority: Priority = Field(
        Priority.INTERACTIVE, description="`interactive` or `bulk`. Workers read interactive jobs first."
    )
    tenant: str | None = Field(
        None,
        pattern=TENANT_PATTERN,
        description="Name of the tenant that the job belongs to, such as a customer or an API key: 1 to 128 letters, "
        "digits or `_.:@/+=-`. Tenants that wait get fair shares of the slots. All jobs without a name are one tenant.",
    )
    stream: bool = Field(
        True,
        description="Publish an event for the tokens of each tick, or of several short ticks. False: the worker stores "
        "tokens only from time to time, and publishes only the start and the end.",
    )
    prompt_progress: bool = Field(
        False,
        description="Publish how much of the prompt is computed, after each chunk of it. Streams yield it as chunks "
        "with `progress`.",
    )
    cancel_on_disconnect: bool = Field(
        False,
        description="Cancel the job after it had no subscriber for `disconnect_s` seconds, a setting of the worker. "
        "This applies to waiting and running jobs, but not to a job that is not due yet.",
    )
    idempotency_key: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="A second submit with the same key and the same request returns the first job, until the result of "
        "this job expires. A submit with the same key and another request is an error. The seed and parameters that do "
        "not change the output may differ. If not set, every submit creates a job.",
    )
    traceparent: str | None = Field(
        None,
        pattern=TRACEPARENT_PATTERN,
        description="Span of OpenTelemetry that the spans of the job belong to, in the form of W3C Trace Context: "
        "`00-TRACE-SPAN-FLAGS`. If not set: the span in which submit was called, if there is one.",
    )
    metadata: JsonObject = Field(
        default_factory=dict, description="Any JSON object. It is stored with the job and returned with the result."
    )

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        if self.delay_s is not None and self.run_at is not None:
            raise ValueError("delay_s and run_at exclude each other: give one")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {self.max_tokens}")
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


def _validate_in_slices(value: Any, validate: Callable[[Any], tuple[int, ...]]) -> tuple[int, ...]:
    """Validate a long prompt slice by slice, so that other threads may run in between."""
    if not isinstance(value, list | tuple) or len(value) <= SLICE_TOKENS:
        return validate(value)
    try:
        slices = [validate(value[start : start + SLICE_TOKENS]) for start in range(0, len(value), SLICE_TOKENS)]
    except ValidationError:
        return validate(value)  # this error names the position within the whole prompt
    return tuple(chain.from_iterable(slices))


class JobRequest(JobParams):
    """A job: its parameters, and either its prompt in exactly one of three forms, or texts to embed."""

    has_random_seed: bool = Field(
        False, description="Whether submit drew the seed. The default seed of a worker replaces such a seed."
    )
    prompt: str | None = Field(
        None, description="The prompt as text. Special tokens in it are parsed; BOS is added if the model asks for it."
    )
    tokens: Annotated[tuple[TokenId, ...], Field(fail_fast=True), WrapValidator(_validate_in_slices)] | None = Field(
        None, description="The prompt as token ids. They are used unchanged; BOS is not added."
    )
    messages: tuple[Message, ...] | None = Field(
        None,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="The prompt as a chat: objects with `role` and `content`. The model's template renders them; "
        "special tokens in the content are not parsed.",
    )
    embed: EmbeddingTask | None = Field(
        None, description="Texts whose embeddings or scores are computed. Such a job generates no text."
    )

    @property
    def kind(self) -> JobKind:
        """What the job computes."""
        if self.embed is None:
            return JobKind.GENERATION
        return JobKind.EMBEDDING if self.embed.query is None else JobKind.RERANKING

    @model_validator(mode="after")
    def _check_embedding(self) -> Self:
        if self.embed is not None and (other := sorted(self.model_fields_set - EMBEDDING_OPTIONS - {"embed"})):
            raise ValueError(f"{other[0]}: not an option of an embedding job, which generates no text")
        return self

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        given = [name for name in ("prompt", "tokens", "messages") if getattr(self, name) is not None]
        if self.embed is not None:
            return self  # `_check_embedding` refuses a prompt
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, tokens and messages (given: {', '.join(given) or 'none'})")
        if not getattr(self, given[0]) and given[0] != "prompt":
            raise ValueError(f"{given[0]} is empty")
        if self.messages is None and self.template_fields:
            raise ValueError(f"{self.template_fields[0]}: only for a chat, and this prompt has no messages")
        return self


class JobDefaults(SamplingDefaults):
    """Defaults of jobs. A job may override each of them."""

    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Default seed of jobs. If not set: each job has a random seed."
    )
    grammar: str | None = Field(
        None,
        max_length=MAX_GRAMMAR_BYTES,
        description="Default grammar, in GBNF, of jobs that set no constraint. A job with an empty `grammar` has no "
        "constraint.",
    )
    grammar_root: str = Field(
        "root", pattern=GRAMMAR_ROOT_PATTERN, description="Default name of the rule that a grammar starts with."
    )

    def complete(self, request: JobRequest) -> JobRequest:
        """Return the request with these defaults for its seed and grammar."""
        grammar = request.grammar or None
        if request.grammar is None and not request.constraints and self.grammar:
            grammar = self.grammar
        root = request.grammar_root
        values: dict[str, Any] = {"grammar": grammar, "grammar_root": root or self.grammar_root if grammar else root}
        if self.seed is not None and request.has_random_seed:
            values["seed"] = self.seed
        if all(getattr(request, name) == value for name, value in values.items()):
            return request
        return request.model_copy(update=values)


class JobOptions(TypedDict, total=False):
    """The fields of `JobParams` as keyword arguments, for type checkers.

    `JobParams` describes them. A test compares the names.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str] | tuple[str, ...]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    min_keep: int
    samplers: str | list[str] | tuple[str, ...]
    tools: Sequence[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    max_tokens: int | None
    min_tokens: int
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | tuple[int, ...] | None
    bad_words: list[str] | tuple[str, ...]
    grammar: str | None
    grammar_root: str | None
    json_schema: dict[str, Any] | None
    regex: str | None
    choice: list[str] | tuple[str, ...] | None
    lark: str | None
    logprobs: int | None
    post_sampling_probs: bool
    prompt_logprobs: int | None
    reasoning_budget: int | None
    reasoning_open: str
    reasoning_close: str
    stop: str | list[str] | tuple[str, ...]
    include_stop_str_in_output: bool
    stop_token_ids: list[int] | tuple[int, ...]
    ignore_eos: bool
    special: bool
    cache_prompt: bool
    lora: Mapping[str, float] | Mapping[int, float] | None
    draft_max: int | None
    cache_salt: str
    cache_public: int | Literal["system"]
    slot: int | None
    timeout_s: float | None
    queue_timeout_s: float | None
    deadline_s: float | None
    delay_s: float | None
    run_at: datetime | float | str | None
    retries: int
    priority: Priority | Literal["interactive", "bulk"]
    tenant: str | None
    stream: bool
    prompt_progress: bool
    cancel_on_disconnect: bool
    idempotency_key: str | None
    traceparent: str | None
    metadata: dict[str, Any]
