"""The outcome of a job: its state, the reason for its end, its output and its measurements."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, InstanceOf, JsonValue, PlainSerializer

from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.protocol.wire_model import WireModel


class TokenLogprobs(NamedTuple):
    """The probability of a generated token and of its alternatives, as natural logarithms."""

    logprob: float
    """Logarithm of the probability of the generated token."""
    top: tuple[tuple[int, float], ...]
    """Id and logarithm of the most probable tokens at this position, the most probable one first."""


class JobState(StrEnum):
    """The state of a job in its queue."""

    QUEUED = "queued"
    """The job waits for a slot, in the queue or in a worker. A preempted job waits again."""
    RUNNING = "running"
    """The job has a slot of a worker now."""
    FINISHED = "finished"
    """The job ended with a result; its `FinishReason` names the cause."""
    FAILED = "failed"
    """The job ended with an error."""


class FinishReason(StrEnum):
    """Why a job ended without an error."""

    STOP = "stop"
    """The model generated an end-of-generation token or a stop string, or the grammar was complete."""
    LENGTH = "length"
    """The job reached `max_tokens` or its context limit."""
    CANCELLED = "cancelled"
    """A client called `cancel()`, or a job with `cancel_on_disconnect` had no subscriber."""
    DEADLINE = "deadline"
    """The job reached one of its time limits."""


class CacheTier(StrEnum):
    """The place that a reused prefix came from, from the nearest to the farthest."""

    RUNNING = "running"
    """The sequence of a running job."""
    DEVICE = "device"
    """A cached sequence in the KV cells of llama.cpp."""
    HOST = "host"
    """Host memory."""
    DISK = "disk"
    """A file below the worker's `cache_dir`."""


class JobStats(WireModel):
    """Measurements of one job.

    Times describe the last attempt of the job, from its first slot on. Only `queue_ms` describes the wait for the first
    slot of the first attempt.

    Rates describe the last run of the last attempt: a preempted job has several runs in one attempt.
    """

    prompt_tokens: int = Field(0, description="Number of tokens in the prompt.")
    generated_tokens: int = Field(0, description="Number of generated tokens, over all attempts.")
    duration_ms: float = Field(
        0.0, description="Milliseconds from the first slot of the attempt to the end of the job."
    )
    ttft_ms: float | None = Field(
        None,
        description="Time to first token: milliseconds from the first slot of the attempt to its first token. Add "
        "`queue_ms` for the time since submit. None: no token was generated.",
    )
    prompt_eval_rate: float | None = Field(
        None,
        description="Prompt tokens computed per second; tokens from the prefix cache do not count. None: not measured.",
    )
    generation_rate: float | None = Field(
        None, description="Tokens generated per second, after the first token of the last run. None: not measured."
    )
    prefix_cache_tokens: int = Field(
        0, description="Number of prompt tokens that the last run reused from the prefix cache."
    )
    prefix_cache_ratio: float = Field(
        0.0,
        description="Share of the tokens of the job that the last run reused: of the prompt, and of the tokens that "
        "earlier runs generated.",
    )
    prefix_cache_tier: CacheTier | None = Field(
        None,
        description="The farthest tier that reused tokens came from: `running`, `device`, `host` or `disk`. "
        "None: no token was reused.",
    )
    prefix_cache_seq_id: int | None = Field(
        None,
        description="Sequence of llama.cpp from which the cells of reused tokens were copied. None: no cells were "
        "copied on the device.",
    )
    evicted_tokens: int = Field(
        0, description="Number of cached tokens that were evicted from the device to make room for the job."
    )
    drafted_tokens: int = Field(0, description="Speculation: number of drafted tokens that the last attempt verified.")
    accepted_tokens: int = Field(0, description="Speculation: number of these tokens that became tokens of the output.")
    queue_ms: float = Field(
        0.0,
        description="Milliseconds from submit or the due time to the first slot, or to the end of a job without one.",
    )
    preempted_ms: float | None = Field(
        None,
        description="Milliseconds of `duration_ms` in which the job had no slot, because it was preempted. "
        "None: it was not preempted in the last attempt.",
    )
    seq_id: int | None = Field(
        None, description="Sequence of llama.cpp that the job ran in. None: it never had a slot."
    )
    slot: int | None = Field(None, description="Index of the slot that the job ran in. None: it never had a slot.")
    worker: str | None = Field(None, description="Id of the worker that ran the job. None: no worker ran it.")
    seed: int | None = Field(None, description="Seed of the random draws. None: the job was not prepared.")
    stop_string: str | None = Field(None, description="The stop string that ended the job. None: none did.")
    stop_token: int | None = Field(
        None, description="The token of `stop_token_ids` that ended the job. None: none did."
    )
    mode: Literal["stream", "generate", "embed"] = Field(
        "stream",
        description="`stream` if the job published its tokens as they were generated; `generate` after the call "
        "`generate`, `chat`, or a submit with `stream=False`; `embed` for embeddings and scores.",
    )


class Result(WireModel):
    """The output of a job that finished."""

    model_config = ConfigDict(ser_json_bytes="base64")

    job_id: str = Field(description="Id of the job.")
    text: str = Field(description="The generated text.")
    tokens: tuple[int, ...] = Field(description="The generated token ids.")
    logprobs: tuple[TokenLogprobs, ...] | None = Field(
        None, description="For each token, its `logprob` and the list `top`. None: not asked for, or no token."
    )
    prompt_logprobs: (
        Annotated[
            InstanceOf[PromptLogprobs],
            PlainSerializer(PromptLogprobs.as_json, return_type=list[dict[str, Any] | None], when_used="json"),
        ]
        | None
    ) = Field(
        None,
        description="For each token of the prompt, `token`, `logprob`, `top` and `rank`; None for the first one. None: "
        "the job did not ask for `prompt_logprobs`, or ended before its prompt was computed.",
    )
    tag_offsets: tuple[int, ...] = Field(
        (),
        description="Positions in `text`, in characters, of the tokens that are tags of reasoning or tool calls, such "
        "as `<tool_call>`, if the job has `special`. A tag that is spelled with other tokens is not among them.",
    )
    embeddings: tuple[Embedding, ...] | None = Field(
        None,
        description="For each input, `n_tokens`, `n_rows` and the vectors as `data`. None: the job generated text, or "
        "ended before it was complete.",
    )
    finish_reason: FinishReason = Field(description="Why the job ended: `stop`, `length`, `cancelled` or `deadline`.")
    stats: JobStats = Field(description="Measurements of the job.")
    seed: int = Field(
        description="Seed of the random draws: the seed of the request, else the worker's default, else a random seed "
        "that submit has drawn."
    )
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="The metadata of the request.")
