"""Prints the output of the commands: text for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import typer
from pydantic import BaseModel

from llamaq.cli.columns import show_fields, show_rows
from llamaq.producer import (
    Chunk,
    DeadLetter,
    DeadLetterDetails,
    FinishReason,
    JobStatus,
    JobSummary,
    NoWorker,
    QueueDepth,
    QueueMode,
    QueueStats,
    QueueSummary,
    RecentJob,
    SlotFile,
    Worker,
    WorkerSlots,
)

MAX_RECENT_ROWS = 20
"""Largest number of jobs in the table of the last jobs."""
NO_VALUE = "-"
UNFINISHED = {
    FinishReason.CANCELLED: "the job was cancelled before its end",
    FinishReason.DEADLINE: "the job reached its time limit before its end",
}
"""Maps each finish reason of an incomplete text to a notice, except the reason that the caller limited its length."""


def show_json(*models: BaseModel) -> None:
    """Print each model as one line of JSON."""
    for model in models:
        typer.echo(model.model_dump_json())


def show_json_fields(**fields: object) -> None:
    """Print one JSON object with these fields."""
    typer.echo(json.dumps(fields))


def notice(text: str) -> None:
    """Print one line on standard error, which does not mix with the output."""
    typer.echo(f"llamaq: {text}", err=True)


def show_stream(chunks: Iterable[Chunk], *, as_json: bool = False) -> None:
    """Print each chunk as it arrives.

    Args:
        chunks: The chunks of a job.
        as_json: Whether to print one JSON object per chunk. Otherwise the text is printed, and a newline at the end.
            The progress of the prompt is printed on standard error then.
    """
    for chunk in chunks:
        progress = chunk.progress
        if progress is not None and as_json:
            show_json(progress)
        elif progress is not None:
            notice(f"{progress.processed_tokens} of {progress.total_tokens} tokens of the prompt are ready")
        elif as_json:
            show_json(_ChunkRow(text=chunk.text, tokens=chunk.tokens, index=chunk.index, offset=chunk.offset))
        else:
            typer.echo(chunk.text, nl=False)
    if not as_json:
        typer.echo()


class _ChunkRow(BaseModel):
    text: str
    tokens: tuple[int, ...]
    index: int
    offset: int


def show_status(status: JobStatus) -> None:
    """Print one line for each known field of a job's status."""
    values = status.model_dump(mode="json", exclude_none=True)
    show_fields([(name, str(value)) for name, value in values.items()])


def show_queues(queues: Sequence[QueueSummary]) -> None:
    """Print one row for each queue."""
    rows = [
        (
            queue.queue,
            str(queue.waiting),
            str(queue.running),
            str(queue.workers),
            queue.mode.value,
            NO_VALUE if queue.oldest_waiting_s is None else format_age(queue.oldest_waiting_s),
            ", ".join(queue.models) or NO_VALUE,
        )
        for queue in queues
    ]
    names = ("queue", "waiting", "running", "workers", "mode", "oldest", "model")
    show_rows(names, rows, missing="no queue has a job or a worker")


def show_jobs(jobs: Sequence[JobSummary], missing: str) -> None:
    """Print one row for each job, or `missing` if there is none. The state of a job that is not due is `delayed`."""
    has_tenants = any(job.tenant for job in jobs)
    rows = [
        (
            job.job_id,
            job.state.value if job.run_at_ms is None else "delayed",
            job.priority.value,
            format_age(job.age_s),
            *([job.tenant or NO_VALUE] if has_tenants else []),
            f"{job.attempt} {job.worker}" if job.worker else NO_VALUE,
        )
        for job in jobs
    ]
    names = ("job", "state", "priority", "age", *(["tenant"] if has_tenants else []), "attempt")
    show_rows(names, rows, missing=missing)


def show_workers(workers: Sequence[Worker], queue: str) -> None:
    """Print a table of workers and a table of their prefix caches."""
    rows = [
        (
            worker.card.worker,
            f"{sum(slot.job_id is not None for slot in worker.slots)}/{worker.card.n_parallel}",
            f"{worker.cache.used_cells}/{worker.cache.n_cells}",
            str(worker.ticks),
            str(worker.jobs_done),
            worker.card.device,
            f"{worker.card.model} ({worker.card.quantization})",
        )
        for worker in workers
    ]
    names = ("worker", "slots", "cells used", "ticks", "jobs done", "device", "model")
    show_rows(names, rows, missing=str(NoWorker(queue)))
    if workers:
        typer.echo("\nprefix caches")
        _show_caches(workers)


def _show_caches(workers: Sequence[Worker]) -> None:
    """Print the prefix cache of each worker. `CacheSnapshot` documents the columns."""
    rows = []
    for worker in workers:
        cache = worker.cache
        sizes = (cache.entries, cache.shared_cells, cache.host_bytes >> 20, cache.disk_bytes >> 20)
        counters = (cache.hits, cache.misses, cache.hit_tokens, cache.evictions, cache.preemptions)
        rows.append((*map(str, sizes + counters), worker.card.worker))
    names = ("entries", "shared", "host MiB", "disk MiB", "hits", "misses", "reused", "evicted", "preempted", "worker")
    show_rows(names, rows, missing="")


def show_slots(workers: Sequence[WorkerSlots]) -> None:
    """Print two tables for each worker: its slots, and the states saved on its host."""
    for index, worker in enumerate(workers):
        typer.echo(("\n" if index else "") + f"slots of {worker.worker}")
        rows = [
            (
                str(slot.index),
                slot.state,
                *map(str, (slot.prompt_tokens, slot.cached_tokens, slot.generated_tokens, slot.content_tokens)),
                slot.job_id or NO_VALUE,
            )
            for slot in worker.slots
        ]
        show_rows(("slot", "state", "prompt", "cached", "generated", "content", "job"), rows, missing="no slots")
        if worker.files:
            typer.echo("\nsaved states")
            _show_files(worker.files)


def _show_files(files: Sequence[SlotFile]) -> None:
    rows = []
    for file in files:
        usable = "yes" if file.is_usable else "no"
        rows.append((str(file.n_tokens), str(file.n_bytes), _format_time(file.saved_ms), usable, file.name))
    show_rows(("tokens", "bytes", "saved (UTC)", "for this model", "name"), rows, missing="")


def show_dead_letters(letters: Sequence[DeadLetter], queue: str) -> None:
    """Print one row for each dead letter."""
    rows = [(letter.id, _format_time(letter.dead_ms), letter.reason) for letter in letters]
    show_rows(("id", "died (UTC)", "reason"), rows, missing=f"queue {queue!r} has no dead letters")


def show_dead_letter(letter: DeadLetterDetails) -> None:
    """Print one line for each known field of a dead letter, and its request as JSON."""
    values = {"id": letter.id, "reason": letter.reason, "workers": " ".join(letter.workers), "text": letter.text}
    values |= {"held": letter.held, "died (UTC)": _format_time(letter.dead_ms)}
    if letter.request is not None:
        values["request"] = letter.request.model_dump_json(exclude_defaults=True)
    elif letter.job_id is not None:
        values["request"] = "expired"
    show_fields([(name, value) for name, value in values.items() if value])


def depth_line(depth: QueueDepth) -> str:
    """Return the numbers of jobs in a queue, and the mode unless it is open. Delayed jobs appear only if there are
    any.
    """
    delayed = f", {depth.delayed} delayed" if depth.delayed else ""
    mode = "" if depth.mode is QueueMode.OPEN else f", {depth.mode}"
    return f"{depth.waiting} waiting, {depth.running} running{delayed}{mode}"


def show_stats(stats: QueueStats) -> None:
    """Print the depth of a queue, its workers, and its last jobs."""
    typer.echo(f"queue {stats.queue}: {depth_line(stats.depth)}\n")
    show_workers(stats.workers, stats.queue)
    if stats.recent:
        typer.echo("\nlast jobs")
    names = ("end", "prompt", "generated", "cached", "queue ms", "ttft ms", "ms", "tok/s", "job")
    rows = [_recent_row(job) for job in stats.recent[:MAX_RECENT_ROWS]]
    show_rows(names, rows, missing="\nno job of this queue has ended")


def _recent_row(job: RecentJob) -> tuple[str, ...]:
    """Return how the job ended (its finish reason or error code), its measurements and its id."""
    stats = job.stats
    numbers = (stats.queue_ms, stats.ttft_ms, stats.duration_ms, stats.generation_rate)
    return (
        job.error_code or (job.finish_reason.value if job.finish_reason else NO_VALUE),
        str(stats.prompt_tokens),
        str(stats.generated_tokens),
        f"{stats.prefix_cache_ratio:.0%}",
        *(NO_VALUE if number is None else f"{number:.1f}" for number in numbers),
        job.job_id,
    )


def _format_time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def format_age(seconds: float) -> str:
    """Return an age in its largest unit, rounded down: `59s`, `59m`, `47h`, `9d`."""
    for unit, length_s, limit in (("s", 1, 60), ("m", 60, 60), ("h", 3600, 48)):
        if seconds < length_s * limit:
            return f"{int(seconds / length_s)}{unit}"
    return f"{int(seconds / 86400)}d"
