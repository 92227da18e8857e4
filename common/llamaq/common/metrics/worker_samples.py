"""The metrics of one worker, from the state that its heartbeat publishes."""

from __future__ import annotations

from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.metric_definitions import Family, Histogram, Labels, Samples
from llamaq.common.protocol.queue_and_worker_state import Worker


def add_worker(samples: Samples, worker: Worker, now_ms: float) -> None:
    """Add the metrics of a worker.

    Args:
        samples: Receives the metrics.
        worker: The state of the worker.
        now_ms: The time on the clock of the worker's heartbeat, in milliseconds since the epoch.
    """
    card, cache, totals = worker.card, worker.cache, worker.totals
    n_computed = totals.decode_tokens + totals.drafted_tokens - totals.accepted_tokens + totals.prefill_tokens
    labels: Labels = (card.queue, card.worker)
    n_busy = sum(slot.job_id is not None for slot in worker.slots)
    samples.set(f.WORKER_INFO, (*labels, card.model, card.device, card.host, card.version), 1)
    values: dict[Family, float | Histogram] = {
        f.WORKER_STARTED: card.started_ms / 1000,
        f.WORKER_TICK_AGE: max(0.0, now_ms - worker.heartbeat_ms + worker.tick_age_ms) / 1000,
        f.SLOTS_BUSY: n_busy,
        f.SLOTS_FREE: len(worker.slots) - n_busy,
        f.KV_CELLS: cache.n_cells,
        f.KV_CELLS_USED: cache.used_cells,
        f.KV_CELLS_RESERVED: cache.reserved_cells,
        f.KV_CELLS_SHARED: cache.shared_cells,
        f.CACHED_SEQUENCES: cache.entries,
        f.CACHE_HOST_BYTES: cache.host_bytes,
        f.CACHE_DISK_BYTES: cache.disk_bytes,
        f.CACHE_HITS: cache.hits,
        f.CACHE_MISSES: cache.misses,
        f.CACHE_EVICTIONS: cache.evictions,
        f.PREEMPTIONS: cache.preemptions,
        f.DECODE_TOKENS: totals.decode_tokens,
        f.DRAFTED_TOKENS: totals.drafted_tokens,
        f.ACCEPTED_TOKENS: totals.accepted_tokens,
        f.PREFILL_TOKENS: totals.prefill_tokens,
        f.TICK_DURATION: Histogram(totals.tick_time_counts, totals.eval_ms / 1000),
        f.BATCH_SIZE: Histogram(totals.batch_size_counts, n_computed),
    }
    for family, value in values.items():
        samples.set(family, labels, value)
