"""The counters of the jobs of a queue, from the hashes in Redis that the scripts write.

Each partition has a hash `metrics`. `scripts/_metrics.lua` has the table of its fields, and counts each job once, in
the script that ends the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llamaq.common.errors import ErrorCode
from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.buckets import INFINITE
from llamaq.common.metrics.metric_definitions import Histogram, Labels, Samples
from llamaq.common.protocol.job_outcome import CacheTier, FinishReason
from llamaq.common.protocol.job_request import Priority

OTHER = "other"
"""The reason of an end that this version of llamaq does not know."""
NO_TIER = "none"

_TIMES = {
    f.TIME_TO_FIRST_TOKEN: "first_token_ms",
    f.INTER_TOKEN: "inter_token_ms",
    f.QUEUE_WAIT: "queue_ms",
    f.JOB_DURATION: "duration_ms",
}
_LENGTHS = {f.PROMPT_LENGTH: "prompt_tokens", f.OUTPUT_LENGTH: "output_tokens"}
_REASONS = {"finished": tuple(FinishReason), "failed": (*ErrorCode, OTHER)}
_OF_QUEUE = {f.ATTEMPTS: "attempts", f.RETRIES: "retries", f.CRASHES: "crashes"}

MAX_DIGITS = 20
"""Fields with longer numbers were not written by llamaq."""

Counts = Mapping[str, int]


def sum_partitions(hashes: Iterable[Mapping[bytes, bytes]]) -> dict[str, int]:
    """Return the sum of the counters of several partitions. Fields that are not counters are left out."""
    counts: dict[str, int] = {}
    for stored in hashes:
        for name, value in stored.items():
            if value.isdigit() and len(value) < MAX_DIGITS:
                field = name.decode(errors="replace")
                counts[field] = counts.get(field, 0) + int(value)
    return counts


def add_job_counters(samples: Samples, queue: str, counts: Counts) -> None:
    """Add the metrics of the jobs of a queue. Counters that Redis does not have yet are zero."""
    for family, field in _OF_QUEUE.items():
        samples.set(family, (queue,), counts.get(field, 0))
    for priority in Priority:
        _add_priority(samples, (queue, priority.value), priority.value, counts)


def _add_priority(samples: Samples, labels: Labels, priority: str, counts: Counts) -> None:
    def count(name: str) -> int:
        return counts.get(f"{priority}:{name}", 0)

    samples.set(f.JOBS_SUBMITTED, labels, count("submitted"))
    for state, reasons in _REASONS.items():
        for reason in reasons:
            samples.set(f.JOBS_ENDED, (*labels, state, reason), count(f"{state}:{reason}"))
        _add_unknown_reasons(samples, labels, state, f"{priority}:{state}:", counts)
    for tier in (*CacheTier, NO_TIER):
        samples.set(f.CACHE_LOOKUPS, (*labels, tier), count(f"lookups:{tier}"))
    for tier in CacheTier:
        samples.set(f.CACHED_TOKENS, (*labels, tier), count(f"cached:{tier}"))
    samples.set(f.COMPUTED_TOKENS, labels, count("computed"))
    samples.set(f.PROMPT_TOKENS, labels, count("prompt_tokens:sum"))
    samples.set(f.GENERATED_TOKENS, labels, count("output_tokens:sum"))
    for family, name in _TIMES.items():
        bounds = [round(bound * 1000) for bound in family.bounds]
        samples.set(family, labels, _histogram(bounds, f"{priority}:{name}:", counts, unit=1000))
    for family, name in _LENGTHS.items():
        samples.set(family, labels, _histogram(family.bounds, f"{priority}:{name}:", counts, unit=1))


def _add_unknown_reasons(samples: Samples, labels: Labels, state: str, prefix: str, counts: Counts) -> None:
    """Count ends with a reason of another version of llamaq as `OTHER`, so that the number of reasons is bounded."""
    known = {f"{prefix}{reason}" for reason in _REASONS[state]}
    n_other = sum(count for field, count in counts.items() if field.startswith(prefix) and field not in known)
    if n_other:
        samples.set(f.JOBS_ENDED, (*labels, state, OTHER), n_other)


def _histogram(bounds: Sequence[float], prefix: str, counts: Counts, *, unit: int) -> Histogram:
    """Return a histogram. A value of a bucket that this version does not have is counted in the next larger one."""
    by_bucket = [0] * (len(bounds) + 1)
    for field, count in counts.items():
        name = field.removeprefix(prefix)
        if name == INFINITE and field != name:
            by_bucket[-1] += count
        elif field != name and name.isascii() and name.isdigit() and len(name) < MAX_DIGITS:
            by_bucket[next((at for at, bound in enumerate(bounds) if int(name) <= bound), len(bounds))] += count
    return Histogram(tuple(by_bucket), counts.get(f"{prefix}sum", 0) / unit)
