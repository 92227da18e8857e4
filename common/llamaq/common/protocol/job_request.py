"""A job as its producer submits it: the prompt and the parameters.

The producer validates a request on submit. The worker validates it again, because other clients of Redis can also
write requests.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, WrapValidator, model_validator

from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.embedding_task import EmbeddingTask, JobKind
from llamaq.common.protocol.output_params import (
    GRAMMAR_ROOT_PATTERN,
    MAX_GRAMMAR_BYTES,
    MAX_SEED,
    OutputParams,
    TokenId,
)
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.protocol.wire_model import JsonObject

MAX_MESSAGES = 4096
MAX_RETRIES = 100
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


class JobParams(OutputParams):
    """All parameters of a job except its prompt."""

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
    generation_timeout_s: float | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Time of generation in seconds, from the first token on, after which the job ends with `deadline` "
        "at the next line break of its output. The time of the prompt does not count. For completions in editors. If "
        "not set: no limit.",
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
        description="Publish how much of the prompt is computed, at its start and after each part. Streams yield "
        "chunks with `progress`.",
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
    def _check_times(self) -> Self:
        if self.delay_s is not None and self.run_at is not None:
            raise ValueError("delay_s and run_at exclude each other: give one")
        return self


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
