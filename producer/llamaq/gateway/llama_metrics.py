"""The metrics of llama-server, as sums over all queues and their live workers. `llamaq metrics` has many more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.queue_and_worker_state import QueueDepth, Worker

Line = tuple[str, str, str, float]
"""Name, type, help and value of a metric."""


def metrics_text(counts: Mapping[str, int], depths: Sequence[QueueDepth], workers: Sequence[Worker]) -> str:
    """Return the metrics in the form of Prometheus.

    Args:
        counts: The counters of the jobs, with the names of `_metrics.lua`.
        depths: The numbers of waiting and running jobs of each queue.
        workers: The live workers.
    """
    return "".join(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
        for name, kind, text, value in [*_of_jobs(counts), *_of_queues(depths), *_of_workers(workers)]
    )


def _of_jobs(counts: Mapping[str, int]) -> list[Line]:
    def total(name: str) -> int:
        return sum(counts.get(f"{priority.value}:{name}", 0) for priority in Priority)

    computed, generated = total("computed"), total("output_tokens:sum")
    cached = sum(total(f"cached:{tier.value}") for tier in CacheTier)
    prompt_s = total("prompt_ms") / 1000
    generated_s = total("inter_token_ms:sum") / 1000
    return [
        ("prompt_tokens_total", "counter", "Prompt tokens computed.", computed),
        ("prompt_tokens_cached_total", "counter", "Prompt tokens reused from the prefix cache.", cached),
        ("prompt_seconds_total", "counter", "Seconds from the first slots to the first tokens.", prompt_s),
        ("tokens_predicted_total", "counter", "Tokens generated.", generated),
        ("tokens_predicted_seconds_total", "counter", "Seconds between the generated tokens.", generated_s),
        ("prompt_tokens_seconds", "gauge", "Prompt tokens computed per second.", _ratio(computed, prompt_s)),
        ("predicted_tokens_seconds", "gauge", "Tokens generated per second.", _ratio(generated, generated_s)),
    ]


def _of_queues(depths: Sequence[QueueDepth]) -> list[Line]:
    return [
        ("requests_processing", "gauge", "Jobs in slots.", sum(depth.running for depth in depths)),
        ("requests_deferred", "gauge", "Jobs that wait.", sum(depth.waiting for depth in depths)),
    ]


def _of_workers(workers: Sequence[Worker]) -> list[Line]:
    slots = [slot for worker in workers for slot in worker.slots]
    n_ticks = sum(worker.ticks for worker in workers)
    totals = [worker.totals for worker in workers]
    n_accepted = sum(one.accepted_tokens for one in totals)
    n_decoded = sum(one.decode_tokens for one in totals) - n_accepted
    n_drafted, n_drafts = sum(one.drafted_tokens for one in totals), sum(one.drafts for one in totals)
    longest = max((slot.content_tokens for slot in slots), default=0)
    return [
        ("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted.", n_drafted),
        ("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens accepted.", n_accepted),
        ("spec_decode_num_drafts_total", "counter", "Drafts.", n_drafts),
        ("n_decode_total", "counter", "Calls of llama_decode.", n_ticks),
        # llama-server calls this a counter, and its dashboards expect it.
        ("n_tokens_max", "counter", "Largest number of tokens in a slot.", longest),
        ("n_busy_slots_per_decode", "gauge", "Generating slots in a call of llama_decode.", _ratio(n_decoded, n_ticks)),
    ]


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else 0.0
