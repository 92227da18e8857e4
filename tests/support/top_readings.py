"""Readings of fictitious queues, for tests of `llamaq top`."""

from __future__ import annotations

from typing import Any

from llamaq.cli.top.reading_types import QueueReading, Reading
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_status import DeadLetter, JobSummary
from llamaq.common.protocol.queue_and_worker_state import (
    CacheSnapshot,
    QueueDepth,
    RecentJob,
    SlotSnapshot,
    TickTotals,
    Worker,
    WorkerCard,
)

NOW_MS = 1_000_000


def job_id(queue: str, number: int) -> str:
    return f"{queue}.0.{number:032x}"


def make_worker(
    name: str = "w1",
    *,
    queue: str = "chat",
    heartbeat_ms: int = NOW_MS,
    jobs: dict[int, tuple[str, int]] | None = None,
    n_parallel: int = 4,
    **fields: Any,
) -> Worker:
    """Return a heartbeat. `jobs` has the id and the number of generated tokens of the job of each busy slot."""
    card = WorkerCard(
        worker=name,
        queue=queue,
        model="demo.gguf",
        n_ctx=1000,
        n_ctx_train=1000,
        n_vocab=100,
        n_parallel=n_parallel,
        quantization="Q8_0",
        vocab_hash="0" * 64,
        host="host",
        pid=1,
        device="cpu",
        version="1",
        started_ms=0,
    )
    slots = tuple(
        SlotSnapshot(index=index, state="idle")
        if index not in (jobs or {})
        else SlotSnapshot(
            index=index,
            state="decode",
            job_id=(jobs or {})[index][0],
            prompt_tokens=100,
            cached_tokens=75,
            prefilled_tokens=100,
            generated_tokens=(jobs or {})[index][1],
        )
        for index in range(n_parallel)
    )
    cache = CacheSnapshot(
        n_cells=1000, reserved_cells=0, used_cells=250, entries=3, host_bytes=3 << 30, hits=3, misses=1
    )
    return Worker(card=card, slots=slots, cache=cache, heartbeat_ms=heartbeat_ms, **fields)


def totals(decode: int, prefill: int, eval_ms: float) -> TickTotals:
    return TickTotals(decode_tokens=decode, prefill_tokens=prefill, eval_ms=eval_ms)


def make_recent(queue: str, number: int, *, ended_ms: int, error_code: str | None = None) -> RecentJob:
    return RecentJob(
        job_id=job_id(queue, number),
        finish_reason=None if error_code else FinishReason.STOP,
        error_code=error_code,
        stats=JobStats(prompt_tokens=100, generated_tokens=number, ttft_ms=50.0, queue_ms=10.0, generation_rate=20.0),
        ended_ms=ended_ms,
    )


def make_summary(queue: str, number: int, *, age_s: float = 1.0) -> JobSummary:
    return JobSummary(
        job_id=job_id(queue, number),
        state=JobState.QUEUED,
        priority=Priority.INTERACTIVE,
        age_s=age_s,
        submitted_ms=0,
        attempt=0,
        worker=None,
        generated_tokens=0,
        cancel_requested=False,
    )


def make_letter(queue: str, number: int, *, is_job: bool = True) -> DeadLetter:
    identity = job_id(queue, number)
    return DeadLetter(
        id=identity if is_job else f"{queue}.0.5-0",
        job_id=identity if is_job else None,
        reason="three workers died with it",
        dead_ms=NOW_MS - 5000,
        partition=0,
        entry="5-0",
    )


def make_queue(queue: str = "chat", *, waiting: int = 0, running: int = 0, **fields: Any) -> QueueReading:
    """Return the reading of a queue. `waiting` counts its waiting jobs; `listed` are those that were read."""
    tenants = fields.pop("tenants", ())
    depth = QueueDepth(waiting=waiting, running=running, mode=fields.pop("mode", "open"), tenants=tenants)
    values: dict[str, Any] = {"workers": (), "recent": (), "waiting": fields.pop("listed", ()), **fields}
    return QueueReading(queue=queue, depth=depth, **values)


def make_reading(*queues: QueueReading, now_ms: int = NOW_MS) -> Reading:
    return Reading(now_ms, queues)
