"""What travels between producers and workers, as pydantic models.

Producers validate on submit; workers validate again, because what lies in Redis may come from anyone.
Times are milliseconds since the epoch by the clock of Redis unless a name says otherwise.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, model_validator

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


class JobState(StrEnum):
    """Where a job is on its way."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a job ended that did not fail."""

    STOP = "stop"
    """An end-of-generation token, a stop string, or the end of the grammar."""
    LENGTH = "length"
    """`max_tokens`, or the context limit of the job."""
    CANCELLED = "cancelled"
    """Somebody called `cancel()`, or the reader went away (`cancel_on_disconnect`)."""
    DEADLINE = "deadline"
    """`timeout_s` of running or `queue_timeout_s` of waiting ran out."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Wire(BaseModel):
    """Read by other versions too: fields that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Message(_Frozen):
    """One message of a chat. Its content is plain text: special tokens in it are never parsed."""

    role: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    content: str


class SamplingParams(_Frozen):
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


class CacheTier(StrEnum):
    """Where a reused prefix lay."""

    RUNNING = "running"
    """In the sequence of a job that runs."""
    DEVICE = "device"
    """In a kept sequence."""
    HOST = "host"
    """In the host's memory."""
    DISK = "disk"


class JobStats(_Wire):
    """Measurements of one finished job; rates are tokens per second."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    duration_ms: float = 0.0
    """From the start of the last attempt to its end."""
    ttft_ms: float | None = None
    """Time to first token, from the start of the attempt; add `queue_ms` for the time since submit."""
    prompt_eval_rate: float | None = None
    generation_rate: float | None = None
    """Over the tokens after the first one."""
    prefix_cache_tokens: int = 0
    prefix_cache_ratio: float = 0.0
    prefix_cache_tier: CacheTier | None = None
    """The farthest tier that reused tokens came from; None when none were reused."""
    queue_ms: float = 0.0
    """From submit to the start of the first attempt."""
    seq_id: int | None = None
    slot: int | None = None
    worker: str | None = None
    mode: Literal["stream", "result"] = "stream"
    """Whether the job had per-token events."""


class Result(_Wire):
    """What a job gave."""

    job_id: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: JobStats
    seed: int
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class Started(_Wire):
    """An attempt began. Later attempts announce themselves too; tokens go on where they were."""

    type: Literal["started"] = "started"
    attempt: int
    worker: str


class Tokens(_Wire):
    """Tokens from `offset` on, and the text that they completed, from character `text_offset` on.

    Text trails tokens: an incomplete UTF-8 character or the possible beginning of a stop string is held back.
    """

    type: Literal["tokens"] = "tokens"
    offset: int = Field(ge=0)
    tokens: tuple[int, ...]
    text_offset: int = Field(ge=0)
    text: str


class Finished(_Wire):
    """The job ended; its result lies in the job's hash."""

    type: Literal["finished"] = "finished"
    finish_reason: FinishReason
    stats: JobStats


class Failed(_Wire):
    """The job ended with an error of its own."""

    type: Literal["failed"] = "failed"
    code: str
    message: str


Event = Started | Tokens | Finished | Failed
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


class JobStatus(_Wire):
    """A snapshot of a job."""

    job_id: str
    state: JobState
    attempt: int = 0
    worker: str | None = None
    crashes: int = 0
    """Workers that died with it in a row, without it having stored a token."""
    generated_tokens: int = 0
    submitted_ms: int | None = None
    started_ms: int | None = None
    finished_ms: int | None = None
    cancel_requested: bool = False
    finish_reason: FinishReason | None = None
    error: Failed | None = None


class DeadLetter(_Wire):
    """What was given up: a job that workers died of, or an entry that was no job."""

    id: str
    """What `show`, `retry` and `purge` take: the job's id, or for what was no job QUEUE.PARTITION.ENTRY."""
    job_id: str | None
    """None for what was no job."""
    reason: str
    workers: tuple[str, ...] = ()
    """Those that died with the job, in order."""
    dead_ms: int
    partition: int
    entry: str
    """Its entry in the partition's stream of dead letters."""


class DeadLetterDetails(DeadLetter):
    """All that is kept of a dead letter."""

    request: JobRequest | None = None
    """None for what was no job, and for a job that has expired."""
    text: str = ""
    """What the job had generated."""
    tokens: tuple[int, ...] = ()
    held: str = ""
    """What an entry held that was no job, cut to 4 KiB."""


class QueueDepth(_Wire):
    """How many jobs of a queue wait, and how many are with a worker."""

    waiting: int
    running: int


class TickStats(_Wire):
    """Measurements of one tick."""

    batch_size: int
    """Tokens in the batch: `decode_tokens` + `prefill_tokens`."""
    decode_tokens: int
    prefill_tokens: int
    active_slots: int
    queue_depth: int
    """Jobs that wait, as the worker last saw it."""
    eval_ms: float
    """Wall time of `llama_decode` and of sampling."""


class SlotSnapshot(_Wire):
    """One slot as its worker last reported it."""

    index: int
    state: str
    job_id: str | None = None
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    content_tokens: int = 0
    """Tokens of the job that ran here last; of one that runs, those whose cells are there."""


class CacheSnapshot(_Wire):
    """The KV cells of a worker and its prefix cache."""

    n_cells: int
    reserved_cells: int
    """Promised to running jobs, those that they hold already included."""
    used_cells: int = 0
    """Held by running jobs and kept sequences; a shared cell counts once."""
    shared_cells: int = 0
    """What sharing saves: how many more cells there would be if every sequence had its own."""
    entries: int = 0
    """Kept sequences on the device."""
    host_bytes: int = 0
    disk_bytes: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were reused, from any tier."""
    evictions: int = 0
    """Sequences that had to leave the device."""
    preemptions: int = 0
    """Jobs that gave their slot to one of higher priority, to go on later."""


class WorkerCard(_Wire):
    """What a worker is; it does not change while the worker lives."""

    worker: str
    queue: str
    model: str
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_parallel: int
    quantization: str
    chat_template: str | None
    vocab_hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the vocabulary, which lies under `keys.vocab(hash)`."""
    host: str
    pid: int
    device: str
    version: str
    started_ms: int


class Worker(_Wire):
    """A worker's card and its last heartbeat."""

    card: WorkerCard
    slots: tuple[SlotSnapshot, ...] = ()
    cache: CacheSnapshot
    last_tick: TickStats | None = None
    ticks: int = 0
    jobs_done: int = 0
    heartbeat_ms: int
    tick_age_ms: int = 0
    """At the heartbeat: how long ago the last tick began, or the idle engine last woke up."""


class QueueStats(_Wire):
    """A queue at one glance: its depth, its workers, and the stats of the jobs that finished last (newest first)."""

    queue: str
    depth: QueueDepth
    workers: tuple[Worker, ...]
    recent: tuple[JobStats, ...] = ()
