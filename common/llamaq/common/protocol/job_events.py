"""The events that a job publishes to its subscribers."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, InstanceOf, TypeAdapter

from llamaq.common.protocol.job_outcome import FinishReason, JobStats, TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.protocol.wire_model import WireModel


class Started(WireModel):
    """An attempt of the job has its first slot. A later attempt continues at the next token offset."""

    type: Literal["started"] = Field("started", description="Kind of the event.")
    attempt: int = Field(description="Number of the attempt. Only the newest attempt may write.")
    worker: str = Field(description="Id of the worker that runs the attempt.")


class Tokens(WireModel):
    """New tokens, and the text that they completed.

    The text of a token may come in a later event, if it ends with an incomplete UTF-8 character or may be the beginning
    of a stop string.
    """

    type: Literal["tokens"] = Field("tokens", description="Kind of the event.")
    offset: int = Field(ge=0, description="Number of tokens of the job before the first token of this event.")
    tokens: tuple[int, ...] = Field(description="The token ids.")
    text_offset: int = Field(ge=0, description="Number of characters of the job's text before this event's text.")
    text: str = Field(description="The text that became complete; it may be empty.")
    logprobs: tuple[TokenLogprobs, ...] = Field(
        (),
        description="For each token, the logarithm of its probability, and the ids and logarithms of the most probable "
        "tokens, if the job asked for `logprobs`.",
    )
    draws: tuple[float, ...] = Field(
        (),
        description="For each token, its probability in the draw, if later draws depend on it (Mirostat, adaptive-p). "
        "A worker that resumes the job needs them.",
    )
    tag_offsets: tuple[int, ...] = Field(
        (),
        description="Positions in the job's text, in characters, of the tokens that are tags of reasoning or tool "
        "calls, such as `<tool_call>`, if the job has `special`. Only tags that begin in this event's text.",
    )
    prompt_logprobs: Annotated[InstanceOf[PromptLogprobs], BeforeValidator(PromptLogprobs.unpack)] | None = Field(
        None,
        description="The probabilities of the prompt's tokens, in the event with the first token, if the job asked for "
        "`prompt_logprobs`: the prompt's tokens, the number of alternatives, and the packed numbers.",
    )


class TokenSpan(NamedTuple):
    """The content of a `tokens` event, with the fields of `Tokens`.

    Clients decode a `tokens` event for each token of a stream. Creating a tuple takes much less time than creating a
    pydantic model.
    """

    offset: int
    tokens: tuple[int, ...]
    text_offset: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    draws: tuple[float, ...] = ()
    tag_offsets: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


class Finished(WireModel):
    """The job ended without an error. The hash of the job contains its result."""

    type: Literal["finished"] = Field("finished", description="Kind of the event.")
    finish_reason: FinishReason = Field(description="Why the job ended: `stop`, `length`, `cancelled` or `deadline`.")
    stats: JobStats = Field(description="Measurements of the job.")
    text_length: int | None = Field(
        None,
        description="Number of characters of the whole output, which has `stats.generated_tokens` tokens. "
        "None: not known; read the stored output.",
    )


class Failed(WireModel):
    """The job ended with an error. Other jobs are not affected."""

    type: Literal["failed"] = Field("failed", description="Kind of the event.")
    code: str = Field(description="Kind of the error, a value of `ErrorCode`.")
    message: str = Field(description="The error in words.")


class Retried(WireModel):
    """The attempt failed and the job is retried later. This event is published but not stored, because the hash of the
    job contains the same data.
    """

    type: Literal["retried"] = Field("retried", description="Kind of the event.")
    run_at_ms: int = Field(description="Time at which the job is due again, in milliseconds since the epoch.")
    code: str = Field(description="Kind of the error of the attempt, a value of `ErrorCode`.")
    message: str = Field(description="The error in words.")


class PromptProgress(WireModel):
    """The number of tokens that are computed so far, before the job generates its next token.

    An attempt publishes it before it computes the first chunk of the prompt, and after each chunk. It is not stored.
    """

    type: Literal["prompt_progress"] = Field("prompt_progress", description="Kind of the event.")
    total_tokens: int = Field(
        ge=0,
        description="Number of tokens to process: the prompt, and after an interruption the tokens generated so far.",
    )
    cached_tokens: int = Field(ge=0, description="Number of these tokens that came from the prefix cache.")
    processed_tokens: int = Field(ge=0, description="Number of these tokens that are ready: cached or computed.")
    time_ms: float = Field(ge=0, description="Milliseconds since the first chunk was planned, on this run of the job.")


Event = Started | Tokens | Finished | Failed | Retried | PromptProgress

EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
