"""Prints the output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from llamaq.producer import Chunk, DeadLetter, DeadLetterDetails, JobStats, JobStatus, QueueStats, Worker, WorkerSlots

MAX_RECENT_ROWS = 20
"""Largest number of jobs in the table of the last jobs."""


def show_json(model: BaseModel) -> None:
    """Print a model as one line of JSON."""
    typer.echo(model.model_dump_json())


def show_stream(chunks: Iterable[Chunk], *, as_json: bool = False) -> str:
    """Print each chunk as it arrives, and return the whole text.

    Args:
        chunks: The chunks of a job.
        as_json: Whether to print one JSON object per chunk. Otherwise the text is printed, and a newline at the end.
    """
    text = ""
    for chunk in chunks:
        text += chunk.text
        if as_json:
            show_json(_ChunkRow(text=chunk.text, tokens=chunk.tokens, index=chunk.index, offset=chunk.offset))
        else:
            typer.echo(chunk.text, nl=False)
    if not as_json:
        typer.echo()
    return text


class _ChunkRow(BaseModel):
    text: str
    tokens: tuple[int, ...]
    index: int
    offset: int


def show_status(status: JobStatus) -> None:
    """Print one line for each known field of a job's status."""
    table = Table.grid(padding=(0, 2))
    for name, value in status.model_dump(mode="json", exclude_none=True).items():
        table.add_row(name, str(value))
    _print(table)


def show_workers(workers: Sequence[Worker]) -> None:
    """Print a table of workers and a table of their prefix caches."""
    table = Table("worker", "model", "quantization", "device", "slots", "context", "cells used", "ticks", "jobs done")
    for worker in workers:
        card, cache = worker.card, worker.cache
        busy = sum(slot.job_id is not None for slot in worker.slots)
        table.add_row(
            card.worker,
            card.model,
            card.quantization,
            card.device,
            f"{busy}/{card.n_parallel}",
            str(card.n_ctx),
            f"{cache.used_cells}/{cache.n_cells}",
            str(worker.ticks),
            str(worker.jobs_done),
        )
    _print(table)
    _show_caches(workers)


def _show_caches(workers: Sequence[Worker]) -> None:
    """Print the prefix cache of each worker. `CacheSnapshot` documents the columns."""
    columns = ("entries", "shared cells", "host MiB", "disk MiB", "hits", "misses", "reused", "evicted", "preempted")
    table = Table("worker", *columns, title="prefix caches")
    for worker in workers:
        cache = worker.cache
        sizes = (cache.entries, cache.shared_cells, cache.host_bytes >> 20, cache.disk_bytes >> 20)
        counters = (cache.hits, cache.misses, cache.hit_tokens, cache.evictions, cache.preemptions)
        table.add_row(worker.card.worker, *map(str, sizes + counters))
    _print(table)


def show_slots(workers: Sequence[WorkerSlots]) -> None:
    """Print two tables for each worker: its slots, and the states saved on its host."""
    for worker in workers:
        table = Table("slot", "state", "job", "prompt", "generated", "content", title=f"slots of {worker.worker}")
        for slot in worker.slots:
            numbers = (slot.prompt_tokens, slot.generated_tokens, slot.content_tokens)
            table.add_row(str(slot.index), slot.state, slot.job_id or "-", *map(str, numbers))
        _print(table)
        if worker.files:
            table = Table("name", "tokens", "bytes", "saved (UTC)", "for this model", title="saved states")
            for file in worker.files:
                usable = "yes" if file.is_usable else "no"
                table.add_row(file.name, str(file.n_tokens), str(file.n_bytes), _format_time(file.saved_ms), usable)
            _print(table)


def show_dead_letters(letters: Sequence[DeadLetter]) -> None:
    """Print one row for each dead letter."""
    table = Table("id", "died (UTC)", "reason")
    table.columns[0].overflow = "fold"  # never shortened, because users copy the id
    for letter in letters:
        table.add_row(letter.id, _format_time(letter.dead_ms), letter.reason)
    _print(table)


def show_dead_letter(letter: DeadLetterDetails) -> None:
    """Print one line for each known field of a dead letter, and its request as JSON."""
    table = Table.grid(padding=(0, 2))
    for name in ("id", "reason", "workers", "text", "held"):
        value = getattr(letter, name)
        if value:
            table.add_row(name, Text(" ".join(value) if name == "workers" else value))
    table.add_row("died (UTC)", _format_time(letter.dead_ms))
    if letter.request is not None:
        table.add_row("request", Text(letter.request.model_dump_json(exclude_defaults=True)))
    elif letter.job_id is not None:
        table.add_row("request", "expired")
    _print(table)


def show_stats(stats: QueueStats) -> None:
    """Print the depth of a queue, its workers, and its last jobs."""
    typer.echo(f"queue {stats.queue}: {stats.depth.waiting} waiting, {stats.depth.running} running")
    show_workers(stats.workers)
    columns = ("prompt", "generated", "cached", "queue ms", "ttft ms", "ms", "tokens/s")
    table = Table("worker", *columns, title="last jobs")
    for job in stats.recent[:MAX_RECENT_ROWS]:
        table.add_row(*_stats_row(job))
    _print(table)


def _stats_row(stats: JobStats) -> list[str]:
    numbers = (stats.queue_ms, stats.ttft_ms, stats.duration_ms, stats.generation_rate)
    return [
        stats.worker or "-",
        str(stats.prompt_tokens),
        str(stats.generated_tokens),
        f"{stats.prefix_cache_ratio:.0%}",
        *("-" if number is None else f"{number:.1f}" for number in numbers),
    ]


def _format_time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _print(table: RenderableType) -> None:
    # A console reads the width of the terminal when it is created.
    Console(highlight=False).print(table)
