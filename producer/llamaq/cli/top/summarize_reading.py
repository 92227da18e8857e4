"""Turns a reading and the rates of the workers into the lines that the view shows. It decides on plain data alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamaq.cli.top.line_types import (
    DeadLine,
    Overview,
    QueueLine,
    RecentLine,
    SlotLine,
    TenantLine,
    WaitingLine,
    WorkerLine,
)
from llamaq.cli.top.rates import RateTracker, WorkerRates, finish_rate
from llamaq.cli.top.reading_types import QueueReading, Reading
from llamaq.common.protocol.queue_and_worker_state import RecentJob, SlotSnapshot, Worker
from llamaq.common.protocol.queue_config import QueueMode

ALL_QUEUES = "(all)"
"""The name of the sum of all queues. No queue can have it."""


def summarize(reading: Reading, rates: RateTracker) -> Overview:
    """Return the lines of a reading. `rates` has recorded its heartbeats."""
    now_ms = reading.now_ms
    workers = tuple(
        _worker_line(one, rates.of(one.card.worker), now_ms) for queue in reading.queues for one in queue.workers
    )
    queues = tuple(
        _queue_line(queue, [line for line in workers if line.queue == queue.queue], now_ms) for queue in reading.queues
    )
    recent = [_recent_line(queue.queue, job, now_ms) for queue in reading.queues for job in queue.recent]
    return Overview(
        now_ms=now_ms,
        total=_total(queues),
        queues=queues,
        workers=workers,
        waiting=_waiting_lines(reading.queues),
        recent=tuple(sorted(recent, key=lambda line: line.age_s)),
        dead=_dead_lines(reading.queues, now_ms),
        n_hidden_queues=reading.n_hidden_queues,
        damaged_queues=reading.damaged_queues,
        redis_fullness=reading.redis_fullness,
    )


def _worker_line(worker: Worker, rates: WorkerRates, now_ms: int) -> WorkerLine:
    card, cache = worker.card, worker.cache
    n_admissions = cache.hits + cache.misses
    heartbeat_age_s = max(0, now_ms - worker.heartbeat_ms) / 1000
    running = tuple(_slot_line(worker, slot, rates) for slot in worker.slots if slot.job_id is not None)
    return WorkerLine(
        queue=card.queue,
        worker=card.worker,
        model=card.model,
        host=card.host,
        device=card.device,
        busy_slots=len(running),
        slots=card.n_parallel,
        tokens_per_s=rates.tokens_per_s,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        tick_ms=rates.tick_ms,
        decode_per_tick=rates.decode_per_tick,
        prefill_per_tick=rates.prefill_per_tick,
        used_cells=cache.used_cells,
        cells=cache.n_cells,
        cached_sequences=cache.entries,
        host_bytes=cache.host_bytes,
        disk_bytes=cache.disk_bytes,
        hit_ratio=cache.hits / n_admissions if n_admissions else None,
        jobs_done=worker.jobs_done,
        heartbeat_age_s=heartbeat_age_s,
        tick_age_s=heartbeat_age_s + worker.tick_age_ms / 1000,
        running=running,
    )


def _slot_line(worker: Worker, slot: SlotSnapshot, rates: WorkerRates) -> SlotLine:
    job_id = slot.job_id or ""
    return SlotLine(
        queue=worker.card.queue,
        worker=worker.card.worker,
        slot=slot.index,
        state=slot.state,
        job_id=job_id,
        prompt_tokens=slot.prompt_tokens,
        cached_tokens=slot.cached_tokens,
        prefilled_tokens=slot.prefilled_tokens,
        generated_tokens=slot.generated_tokens,
        tokens_per_s=rates.of_jobs.get(job_id),
    )


def _queue_line(reading: QueueReading, workers: Sequence[WorkerLine], now_ms: int) -> QueueLine:
    depth, rate = reading.depth, finish_rate(reading.recent, now_ms)
    return QueueLine(
        queue=reading.queue,
        mode=depth.mode.value,
        waiting=depth.waiting,
        running=depth.running,
        delayed=depth.delayed,
        oldest_waiting_s=reading.oldest_waiting_s,
        jobs_per_s=rate,
        eta_s=_eta_s(depth.waiting, rate),
        tokens_per_s=_sum_known(line.tokens_per_s for line in workers),
        workers=len(workers),
        busy_slots=sum(line.busy_slots for line in workers),
        slots=sum(line.slots for line in workers),
        dead_letters=reading.n_dead,
        models=tuple(sorted({line.model for line in workers})),
        tenants=tuple(
            TenantLine(one.tenant, one.waiting, one.claimed)
            for one in sorted(depth.tenants, key=lambda one: (-one.waiting, one.tenant))
        ),
    )


def _eta_s(n_waiting: int, rate: float | None) -> float | None:
    if n_waiting == 0:
        return 0.0
    return None if rate is None else n_waiting / rate


def _total(queues: Sequence[QueueLine]) -> QueueLine:
    """Return the sum of all queues. Its ETA is that of the slowest queue."""
    etas_s = [line.eta_s for line in queues]
    oldest_s = [line.oldest_waiting_s for line in queues if line.oldest_waiting_s is not None]
    known_etas_s = [eta_s for eta_s in etas_s if eta_s is not None]
    modes = {line.mode for line in queues}
    return QueueLine(
        queue=ALL_QUEUES,
        mode=modes.pop() if len(modes) == 1 else "mixed" if modes else QueueMode.OPEN.value,
        waiting=sum(line.waiting for line in queues),
        running=sum(line.running for line in queues),
        delayed=sum(line.delayed for line in queues),
        oldest_waiting_s=max(oldest_s, default=None),
        jobs_per_s=_sum_known(line.jobs_per_s for line in queues),
        eta_s=max(known_etas_s, default=0.0) if len(known_etas_s) == len(etas_s) else None,
        tokens_per_s=_sum_known(line.tokens_per_s for line in queues),
        workers=sum(line.workers for line in queues),
        busy_slots=sum(line.busy_slots for line in queues),
        slots=sum(line.slots for line in queues),
        dead_letters=sum(line.dead_letters for line in queues),
        models=tuple(sorted({model for line in queues for model in line.models})),
    )


def _waiting_lines(queues: Sequence[QueueReading]) -> tuple[WaitingLine, ...]:
    lines = [
        WaitingLine(
            queue=queue.queue,
            job_id=job.job_id,
            priority=job.priority.value,
            age_s=job.age_s,
            attempt=job.attempt,
            worker=job.worker,
            generated_tokens=job.generated_tokens,
            cancel_requested=job.cancel_requested,
            is_delayed=job.run_at_ms is not None,
            tenant=job.tenant,
        )
        for queue in queues
        for job in queue.waiting
    ]
    return tuple(sorted(lines, key=lambda line: -line.age_s))


def _recent_line(queue: str, job: RecentJob, now_ms: int) -> RecentLine:
    stats = job.stats
    return RecentLine(
        queue=queue,
        job_id=job.job_id,
        end=job.error_code or (job.finish_reason.value if job.finish_reason else ""),
        has_failed=job.error_code is not None,
        age_s=max(0, now_ms - job.ended_ms) / 1000,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        cached_ratio=stats.prefix_cache_ratio,
        queue_ms=stats.queue_ms,
        ttft_ms=stats.ttft_ms,
        tokens_per_s=stats.generation_rate,
        worker=stats.worker,
    )


def _dead_lines(queues: Sequence[QueueReading], now_ms: int) -> tuple[DeadLine, ...]:
    lines = [
        DeadLine(
            queue=queue.queue,
            letter_id=letter.id,
            job_id=letter.job_id,
            reason=letter.reason,
            workers=letter.workers,
            age_s=max(0, now_ms - letter.dead_ms) / 1000,
        )
        for queue in queues
        for letter in queue.dead
    ]
    return tuple(sorted(lines, key=lambda line: line.age_s))


def _sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values. None: no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
