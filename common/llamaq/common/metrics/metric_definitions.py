"""The names, kinds, labels and meanings of all metrics. docs/monitoring.md shows them as a table.

The names follow the conventions of Prometheus: base units, `_total` for counters, `llamaq_` in front. Labels are
bounded: a queue, a priority, a worker, a reason. No label has the id of a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from llamaq.common.metrics.buckets import BATCH_TOKENS, JOB_TIMES_MS, LENGTHS_TOKENS, SHORT_TIMES_MS

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name and what it measures."""

    name: str
    kind: Kind
    labels: Labels
    meaning: str
    bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets of a histogram, in the unit of the metric."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """The value of a histogram."""

    counts: tuple[int, ...]
    """The number of values in each bucket. Values in smaller buckets are not included. The last bucket has no bound."""
    total: float
    """The sum of all values."""


@dataclass(slots=True)
class Samples:
    """Values of metrics, by the metric and the values of its labels."""

    values: dict[Family, dict[Labels, float | Histogram]] = field(default_factory=dict)

    def set(self, family: Family, labels: Labels, value: float | Histogram) -> None:
        """Set a value. A value with the same labels is replaced."""
        self.values.setdefault(family, {})[labels] = value

    def add(self, other: Samples) -> None:
        """Add all values of `other`."""
        for family, values in other:
            self.values.setdefault(family, {}).update(values)

    def __iter__(self) -> Iterator[tuple[Family, dict[Labels, float | Histogram]]]:
        return iter(self.values.items())


def _seconds(bounds_ms: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(bound / 1000 for bound in bounds_ms)


_QUEUE, _PRIORITY, _WORKER = ("queue",), ("queue", "priority"), ("queue", "worker")

# ---- from the counters of a queue in Redis: exact over all workers and restarts

JOBS_SUBMITTED = Family("llamaq_jobs_submitted_total", "counter", _PRIORITY, "Jobs that were submitted.")
JOBS_ENDED = Family(
    "llamaq_jobs_ended_total",
    "counter",
    (*_PRIORITY, "state", "reason"),
    "Jobs that ended. `state` is `finished` or `failed`; `reason` is the finish reason or the error code.",
)
ATTEMPTS = Family(
    "llamaq_job_attempts_total", "counter", _QUEUE, "Claims of jobs by workers. A job that is interrupted has several."
)
RETRIES = Family("llamaq_job_retries_total", "counter", _QUEUE, "Retries after a failure, of jobs with `retries`.")
CRASHES = Family(
    "llamaq_job_crashes_total",
    "counter",
    _QUEUE,
    "Crashes of workers, counted once for each job that the worker prepared or ran. A job that has moved to another "
    "worker before the crash is noticed is not counted.",
)
PROMPT_TOKENS = Family(
    "llamaq_prompt_tokens_total", "counter", _PRIORITY, "Tokens in the prompts of jobs that a worker ended."
)
COMPUTED_TOKENS = Family(
    "llamaq_prompt_tokens_computed_total",
    "counter",
    _PRIORITY,
    "Prompt tokens that were computed in the last run of jobs that a worker ended.",
)
CACHED_TOKENS = Family(
    "llamaq_prompt_tokens_cached_total",
    "counter",
    (*_PRIORITY, "tier"),
    "Prompt tokens that were reused in the last run of jobs that a worker ended. `tier` is the farthest tier that they "
    "came from.",
)
CACHE_LOOKUPS = Family(
    "llamaq_prefix_cache_lookups_total",
    "counter",
    (*_PRIORITY, "tier"),
    "Jobs that a worker ended, by the farthest tier that tokens reused in their last run came from: `running`, "
    "`device`, `host`, `disk`, or `none`.",
)
GENERATED_TOKENS = Family("llamaq_generated_tokens_total", "counter", _PRIORITY, "Generated tokens of ended jobs.")
TIME_TO_FIRST_TOKEN = Family(
    "llamaq_time_to_first_token_seconds",
    "histogram",
    _PRIORITY,
    "Time from submit to the first token of a job, over all its attempts. Counted at the end of the job.",
    _seconds(JOB_TIMES_MS),
)
INTER_TOKEN = Family(
    "llamaq_inter_token_latency_seconds",
    "histogram",
    _PRIORITY,
    "Time between two tokens of a job, pauses after a preemption or a crash included. Counted at the end of the job.",
    _seconds(SHORT_TIMES_MS),
)
QUEUE_WAIT = Family(
    "llamaq_queue_wait_seconds",
    "histogram",
    _PRIORITY,
    "Time from submit to the first slot of a job, or to the end of a job without one. Counted at the end of the job.",
    _seconds(JOB_TIMES_MS),
)
JOB_DURATION = Family(
    "llamaq_job_duration_seconds",
    "histogram",
    _PRIORITY,
    "Time from submit to the end of a job. Its count is the number of ended jobs.",
    _seconds(JOB_TIMES_MS),
)
PROMPT_LENGTH = Family(
    "llamaq_prompt_length_tokens",
    "histogram",
    _PRIORITY,
    "Number of tokens in the prompt of a job that a worker prepared and ended.",
    LENGTHS_TOKENS,
)
OUTPUT_LENGTH = Family(
    "llamaq_output_length_tokens", "histogram", _PRIORITY, "Number of tokens that a job generated.", LENGTHS_TOKENS
)

# ---- the state of a queue

WAITING_JOBS = Family("llamaq_queue_waiting_jobs", "gauge", _QUEUE, "Jobs that wait for a slot.")
RUNNING_JOBS = Family("llamaq_queue_running_jobs", "gauge", _QUEUE, "Jobs that have a slot of a live worker.")
DELAYED_JOBS = Family("llamaq_queue_delayed_jobs", "gauge", _QUEUE, "Jobs that were submitted for a later time.")
OLDEST_WAITING = Family(
    "llamaq_queue_oldest_waiting_seconds", "gauge", _QUEUE, "Age of the oldest waiting job; 0 if no job waits."
)
DEAD_LETTERS = Family("llamaq_queue_dead_letters", "gauge", _QUEUE, "Dead letters, which `llamaq dead` lists.")
WORKERS = Family("llamaq_queue_workers", "gauge", _QUEUE, "Live workers that serve the queue.")
QUEUE_MODE = Family(
    "llamaq_queue_mode",
    "gauge",
    (*_QUEUE, "mode"),
    "1 for the mode of the queue, 0 for the others: `open`, `paused`, `draining`.",
)

# ---- a worker

WORKER_INFO = Family(
    "llamaq_worker_info",
    "gauge",
    (*_WORKER, "model", "device", "host", "version"),
    "1. The labels describe the worker.",
)
WORKER_STARTED = Family(
    "llamaq_worker_start_time_seconds", "gauge", _WORKER, "When the worker started, in seconds since the epoch."
)
WORKER_TICK_AGE = Family(
    "llamaq_worker_tick_age_seconds",
    "gauge",
    _WORKER,
    "Time since the engine thread last showed that it runs. Above a few seconds, the engine hangs.",
)
SLOTS_BUSY = Family("llamaq_worker_slots_busy", "gauge", _WORKER, "Slots that run a job.")
SLOTS_FREE = Family("llamaq_worker_slots_free", "gauge", _WORKER, "Slots without a job.")
KV_CELLS = Family("llamaq_worker_kv_cells", "gauge", _WORKER, "KV cells of the worker (`n_ctx`).")
KV_CELLS_USED = Family(
    "llamaq_worker_kv_cells_used", "gauge", _WORKER, "KV cells that running jobs and cached sequences use."
)
KV_CELLS_RESERVED = Family(
    "llamaq_worker_kv_cells_reserved", "gauge", _WORKER, "KV cells that are reserved for running jobs."
)
KV_CELLS_SHARED = Family(
    "llamaq_worker_kv_cells_shared", "gauge", _WORKER, "KV cells that sharing of prefixes saves at present."
)
CACHED_SEQUENCES = Family("llamaq_worker_cached_sequences", "gauge", _WORKER, "Cached sequences on the device.")
CACHE_HOST_BYTES = Family(
    "llamaq_worker_cache_host_bytes", "gauge", _WORKER, "Host memory that cached prefixes use, in bytes."
)
CACHE_DISK_BYTES = Family(
    "llamaq_worker_cache_disk_bytes", "gauge", _WORKER, "Size of the cached prefixes on disk, in bytes."
)
CACHE_HITS = Family("llamaq_worker_cache_hits_total", "counter", _WORKER, "Admissions that reused computed tokens.")
CACHE_MISSES = Family("llamaq_worker_cache_misses_total", "counter", _WORKER, "Admissions that reused no token.")
CACHE_EVICTIONS = Family(
    "llamaq_worker_cache_evictions_total", "counter", _WORKER, "Cached sequences that were evicted from the device."
)
PREEMPTIONS = Family(
    "llamaq_worker_preemptions_total", "counter", _WORKER, "Running jobs that lost their slot and continued later."
)
DECODE_TOKENS = Family(
    "llamaq_worker_decode_tokens_total", "counter", _WORKER, "Decode tokens computed, one for each generated token."
)
DRAFTED_TOKENS = Family(
    "llamaq_worker_drafted_tokens_total", "counter", _WORKER, "Draft tokens that were verified (`speculation`)."
)
ACCEPTED_TOKENS = Family(
    "llamaq_worker_accepted_tokens_total", "counter", _WORKER, "Draft tokens that became tokens of an output."
)
PREFILL_TOKENS = Family("llamaq_worker_prefill_tokens_total", "counter", _WORKER, "Prompt tokens computed.")
TICK_DURATION = Family(
    "llamaq_worker_tick_duration_seconds",
    "histogram",
    _WORKER,
    "Duration of `llama_decode` and sampling in a tick. Its count is the number of ticks.",
    _seconds(SHORT_TIMES_MS),
)
BATCH_SIZE = Family(
    "llamaq_worker_batch_tokens", "histogram", _WORKER, "Number of tokens in the batch of a tick.", BATCH_TOKENS
)

# ---- the process that serves the metrics

REDIS_UP = Family(
    "llamaq_redis_up", "gauge", (), "1 if Redis answered this scrape, else 0. Then all metrics from Redis are absent."
)
_NODE = ("node",)
REDIS_USED_MEMORY = Family(
    "llamaq_redis_used_memory_bytes",
    "gauge",
    _NODE,
    "Memory that Redis uses. `node` is the address of each master of a Redis Cluster, and otherwise empty. Absent if "
    "the user of Redis has no permission for INFO.",
)
REDIS_MAXMEMORY = Family(
    "llamaq_redis_maxmemory_bytes",
    "gauge",
    _NODE,
    "`maxmemory` of Redis, at which it refuses new jobs; 0 if it has no limit. Absent if INFO is not permitted.",
)
READ_SECONDS = Family(
    "llamaq_metrics_read_seconds", "gauge", (), "Time that this scrape took to read all metrics from Redis."
)

QUEUE_FAMILIES = (
    *(JOBS_SUBMITTED, JOBS_ENDED, ATTEMPTS, RETRIES, CRASHES, PROMPT_TOKENS, COMPUTED_TOKENS, CACHED_TOKENS),
    *(CACHE_LOOKUPS, GENERATED_TOKENS, TIME_TO_FIRST_TOKEN, INTER_TOKEN, QUEUE_WAIT, JOB_DURATION, PROMPT_LENGTH),
    *(OUTPUT_LENGTH, WAITING_JOBS, RUNNING_JOBS, DELAYED_JOBS, OLDEST_WAITING, DEAD_LETTERS, WORKERS, QUEUE_MODE),
)
WORKER_FAMILIES = (
    *(WORKER_INFO, WORKER_STARTED, WORKER_TICK_AGE, SLOTS_BUSY, SLOTS_FREE, KV_CELLS, KV_CELLS_USED),
    *(KV_CELLS_RESERVED, KV_CELLS_SHARED, CACHED_SEQUENCES, CACHE_HOST_BYTES, CACHE_DISK_BYTES, CACHE_HITS),
    *(CACHE_MISSES, CACHE_EVICTIONS, PREEMPTIONS, DECODE_TOKENS, PREFILL_TOKENS, TICK_DURATION, BATCH_SIZE),
    *(DRAFTED_TOKENS, ACCEPTED_TOKENS),
)
READER_FAMILIES = (REDIS_UP, REDIS_USED_MEMORY, REDIS_MAXMEMORY, READ_SECONDS)
