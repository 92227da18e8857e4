"""Snapshots of queues, workers, slots and caches.

Times are milliseconds since the epoch by the clock of Redis, unless a field names another clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from llamaq.common.protocol.embedding_task import JobKind, Pooling
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobDefaults
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.wire_model import WireModel


class TenantDepth(WireModel):
    """The numbers of a tenant's jobs in a queue."""

    tenant: str = Field(
        description="Name of the tenant. Empty: the jobs without a tenant. Only those are counted that were submitted "
        "while some tenant waited."
    )
    waiting: int = Field(description="Number of jobs that no worker has claimed.")
    claimed: int = Field(description="Number of jobs that workers have claimed: they run, or are next.")


class QueueDepth(WireModel):
    """The numbers of waiting and running jobs in a queue."""

    waiting: int = Field(description="Number of jobs without a slot: in the queue, claimed by a worker, or preempted.")
    running: int = Field(description="Number of jobs that have a slot of a live worker now.")
    delayed: int = Field(
        0, description="Number of jobs that are not due: submitted for a later time, or retried later after a failure."
    )
    mode: QueueMode = Field(QueueMode.OPEN, description="`open`, `paused` or `draining`.")
    tenants: tuple[TenantDepth, ...] = Field(
        (), description="The tenants that have jobs, at most 1,000, by their names."
    )


class QueueSummary(WireModel):
    """The jobs and the workers of one queue."""

    queue: str = Field(description="Name of the queue.")
    waiting: int = Field(description="Number of waiting jobs.")
    running: int = Field(description="Number of running jobs.")
    delayed: int = Field(0, description="Number of jobs that are not due.")
    mode: QueueMode = Field(QueueMode.OPEN, description="`open`, `paused` or `draining`.")
    workers: int = Field(description="Number of live workers.")
    models: tuple[str, ...] = Field(description="Names of the models that these workers serve, each once.")
    oldest_waiting_s: float | None = Field(
        description="Seconds that the oldest waiting job has waited: since its submit, or since it was due. None: no "
        "job waits."
    )
    partitions: int = Field(
        description="Number of partitions: the highest partition number with a job stream, plus one."
    )
    tenants: int = Field(0, description="Number of tenants that have jobs, at most 1,000.")


class TickStats(WireModel):
    """Measurements of one tick."""

    batch_size: int = Field(
        description="Number of tokens in the batch: `decode_tokens` + `prefill_tokens`, and the draft tokens that were "
        "not accepted."
    )
    decode_tokens: int = Field(
        description="Number of decode tokens in the batch: one for each generating slot, the tokens that grammars "
        "force, and the draft tokens that were accepted."
    )
    prefill_tokens: int = Field(description="Number of prompt tokens in the batch.")
    active_slots: int = Field(description="Number of slots that run a job.")
    queue_depth: int = Field(description="Number of waiting jobs in the queue at the worker's last heartbeat.")
    eval_ms: float = Field(description="Milliseconds that `llama_decode` and sampling took.")
    drafts: int = Field(0, description="Number of drafts that were verified, at most one for each generating slot.")
    drafted_tokens: int = Field(0, description="Number of tokens in these drafts.")
    accepted_tokens: int = Field(0, description="Number of these tokens that became tokens of an output.")


class TickTotals(WireModel):
    """Sums over all ticks since the worker started. The difference of two heartbeats gives rates and means."""

    decode_tokens: int = Field(0, description="Number of decode tokens. Each yields one generated token.")
    prefill_tokens: int = Field(0, description="Number of prompt tokens that were computed.")
    eval_ms: float = Field(0.0, description="Milliseconds that `llama_decode` and sampling took.")
    drafts: int = Field(0, description="Number of drafts that were verified.")
    drafted_tokens: int = Field(0, description="Number of tokens in these drafts.")
    accepted_tokens: int = Field(0, description="Number of these tokens that became tokens of an output.")
    tick_time_counts: tuple[int, ...] = Field(
        (), description="Number of ticks by their duration: the buckets of `llamaq_worker_tick_duration_seconds`."
    )
    batch_size_counts: tuple[int, ...] = Field(
        (), description="Number of ticks by the size of their batch: the buckets of `llamaq_worker_batch_tokens`."
    )


class SlotSnapshot(WireModel):
    """A slot as its worker last reported it."""

    index: int = Field(description="Index of the slot, from 0.")
    state: str = Field(description="State of the slot: `idle`, `follow`, `load`, `prefill` or `decode`.")
    job_id: str | None = Field(None, description="Id of the running job. None: the slot is free.")
    prompt_tokens: int = Field(0, description="Number of tokens in the prompt of the running job.")
    cached_tokens: int = Field(
        0, description="Number of tokens that the running job reused from the prefix cache and did not compute."
    )
    prefilled_tokens: int = Field(
        0, description="Number of prompt tokens whose KV cells the running job has: computed or reused."
    )
    generated_tokens: int = Field(0, description="Number of tokens that the running job has generated.")
    max_generated_tokens: int = Field(0, description="Largest number of tokens that the running job may generate.")
    content_tokens: int = Field(
        0,
        description="Number of tokens whose KV cells the running job has. In a free slot: number of tokens of the job "
        "that ran here last.",
    )


class CacheSnapshot(WireModel):
    """The KV cells of a worker and its prefix cache. Counters start with the worker."""

    n_cells: int = Field(description="Number of KV cells.")
    reserved_cells: int = Field(description="Number of KV cells reserved for running jobs, used or not yet used.")
    used_cells: int = Field(
        0, description="Number of KV cells used by running jobs and cached sequences. A shared cell counts once."
    )
    shared_cells: int = Field(
        0,
        description="Number of KV cells saved by sharing: without sharing, `used_cells` would be higher by this "
        "number.",
    )
    entries: int = Field(0, description="Number of cached sequences on the device.")
    host_bytes: int = Field(0, description="Bytes of host memory that cached prefixes use.")
    disk_bytes: int = Field(0, description="Bytes on disk that cached prefixes use.")
    hits: int = Field(0, description="Number of admissions that reused computed tokens.")
    misses: int = Field(0, description="Number of admissions that reused no token.")
    hit_tokens: int = Field(0, description="Number of prompt tokens that were reused, from all tiers.")
    evictions: int = Field(0, description="Number of cached sequences that were evicted from the device.")
    preemptions: int = Field(
        0, description="Number of preemptions. A preempted job loses its slot, and continues later."
    )


class LoraScale(WireModel):
    """A LoRA adapter with which a worker computes."""

    name: str = Field(description="Name of the adapter's file.")
    scale: float = Field(description="Factor of the adapter's changes.")


def adapter_places(adapters: Sequence[LoraScale]) -> dict[str, int]:
    """Return the place of each adapter of a worker, by the numbers and the names that a job may use.

    A name takes precedence over a number. If two adapters have one name, it names the first one, and only their
    numbers tell them apart.
    """
    places = {str(number): number for number in range(len(adapters))}
    return places | {each.name: number for number, each in reversed([*enumerate(adapters)])}


class WorkerCard(WireModel):
    """The properties of a worker that do not change while it runs."""

    worker: str = Field(description="Id of the worker.")
    queue: str = Field(description="Name of the queue that the worker serves.")
    model: str = Field(description="Name of the model.")
    kind: JobKind = Field(
        JobKind.GENERATION, description="What its jobs compute: `generation`, `embedding` or `reranking`."
    )
    pooling: Pooling | None = Field(
        None,
        description="How the vectors of tokens become an embedding: `none`, `mean`, `cls`, `last` or `rank`. None: "
        "the worker generates text.",
    )
    n_embd: int = Field(0, description="Number of dimensions of an embedding. 0: the worker generates text.")
    model_hash: str = Field(
        "", description="Fingerprint of the model and its adapters. A job is not continued by another model."
    )
    lora: tuple[LoraScale, ...] = Field((), description="The LoRA adapters of the model: `name` and `scale`.")
    n_ctx: int = Field(description="Number of KV cells, shared by all slots.")
    n_ctx_train: int = Field(description="Context length that the model was trained for, in tokens.")
    context_limit: int = Field(
        0, description="Largest number of tokens of one job, prompt and output together. 0: not known."
    )
    job_defaults: JobDefaults = Field(
        JobDefaults(), description="The sampling parameters, seed and grammar of jobs that do not set them."
    )
    speculation: str = Field("off", description="How the worker drafts tokens: `off`, `ngram` or `model`.")
    n_vocab: int = Field(description="Number of tokens in the vocabulary.")
    end_tokens: tuple[int, ...] = Field((), description="The tokens that end an output, in ascending order.")
    bos_token: str = Field("", description="Text of the token that begins a prompt. Empty: the model has none.")
    eos_token: str = Field("", description="Text of the token that ends a text. Empty: the model has none.")
    n_parallel: int = Field(description="Number of slots.")
    quantization: str = Field(description="Quantization of the model file.")
    chat_template: str | None = Field(None, description="Chat template of the model. None: the model has none.")
    tag_tokens: dict[str, int] = Field(
        default_factory=dict,
        description="The tags of reasoning and tool calls, such as `<tool_call>`, that are one token of the "
        "vocabulary, with the ids of these tokens. Only these tokens are the tags: the same text in other tokens is "
        "text.",
    )
    vocab_hash: str = Field(
        pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the vocabulary, which is stored at `keys.vocab(vocab_hash)`."
    )
    host: str = Field(description="Name of the worker's host.")
    pid: int = Field(description="Process id of the worker.")
    pid_started: int = Field(
        0, description="Start time of the process, in clock ticks after the boot of its host. 0: not known."
    )
    pid_namespace: str = Field("", description="Namespace of `pid`, which differs between containers.")
    boot_id: str = Field("", description="Id of the boot of the host.")
    device: str = Field(description="`cpu`, the index of the only GPU in use, or `all`: all GPUs.")
    version: str = Field(description="Version of llamaq.")
    started_ms: int = Field(description="Time when the worker started, by the clock of its host.")


class Worker(WireModel):
    """A worker's card and its last heartbeat."""

    card: WorkerCard = Field(description="Properties that do not change.")
    slots: tuple[SlotSnapshot, ...] = Field((), description="All slots, in the order of their indices.")
    cache: CacheSnapshot = Field(description="KV cells and prefix cache.")
    last_tick: TickStats | None = Field(None, description="Measurements of the last tick. None: no tick so far.")
    ticks: int = Field(0, description="Number of ticks since the worker started.")
    totals: TickTotals = Field(TickTotals(), description="Sums over these ticks.")
    jobs_done: int = Field(0, description="Number of jobs that ended since the worker started.")
    heartbeat_ms: int = Field(description="Time of the heartbeat.")
    tick_age_ms: int = Field(
        0,
        description="Milliseconds from the last time that the engine thread showed that it runs, to the heartbeat.",
    )


class RecentJob(WireModel):
    """A job that ended lately in a worker. Exactly one of `finish_reason` and `error_code` is set."""

    job_id: str = Field(description="Id of the job.")
    finish_reason: FinishReason | None = Field(None, description="Why the job finished. None: it failed.")
    error_code: str | None = Field(None, description="Kind of the error of a failed job. None: it finished.")
    stats: JobStats = Field(description="Measurements of the job.")
    ended_ms: int = Field(0, description="Time when its end was stored in the stats of the queue.")


class QueueStats(WireModel):
    """Depth, workers and last jobs of a queue."""

    queue: str = Field(description="Name of the queue.")
    depth: QueueDepth = Field(description="Numbers of waiting and running jobs.")
    workers: tuple[Worker, ...] = Field(description="The workers that serve the queue.")
    recent: tuple[RecentJob, ...] = Field((), description="The jobs that ended last, newest first.")
