"""How the command line shows what it knows: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails, JobStatus
from llamaq.common.protocol.queue_state import QueueStats, Worker
from llamaq.common.protocol.slot_commands import WorkerSlots
from llamaq.producer.job import Chunk

console = Console(highlight=False)


def show_json(model: BaseModel) -> None:
    """One JSON object on one line."""
    typer.echo(model.model_dump_json())


def show_stream(chunks: Iterable[Chunk], *, as_json: bool = False) -> str:
    """Each piece of text as it comes, and a newline at the end; with `as_json` one object a line. Returns the text."""
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
    """One line for each thing that is known of a job."""
    table = Table.grid(padding=(0, 2))
    for name, value in status.model_dump(mode="json", exclude_none=True).items():
        table.add_row(name, str(value))
    console.print(table)


def show_workers(workers: Sequence[Worker]) -> None:
    """One row for each worker."""
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
    console.print(table)
    _show_caches(workers)


def _show_caches(workers: Sequence[Worker]) -> None:
    """What the workers keep of prompts, and how much that saved; see `CacheSnapshot`."""
    columns = ("entries", "shared cells", "host MiB", "disk MiB", "hits", "misses", "reused", "evicted", "preempted")
    table = Table("worker", *columns, title="prefix caches")
    for worker in workers:
        cache = worker.cache
        held = (cache.entries, cache.shared_cells, cache.host_bytes >> 20, cache.disk_bytes >> 20)
        counted = (cache.hits, cache.misses, cache.hit_tokens, cache.evictions, cache.preemptions)
        table.add_row(worker.card.worker, *map(str, held + counted))
    console.print(table)


def show_slots(workers: Sequence[WorkerSlots]) -> None:
    """For each worker its slots, and the states that are saved where it runs."""
    for worker in workers:
        table = Table("slot", "state", "job", "prompt", "generated", "content", title=f"slots of {worker.worker}")
        for slot in worker.slots:
            numbers = (slot.prompt_tokens, slot.generated_tokens, slot.content_tokens)
            table.add_row(str(slot.index), slot.state, slot.job_id or "-", *map(str, numbers))
        console.print(table)
        if worker.files:
            table = Table("name", "tokens", "bytes", "when (UTC)", "for this model", title="saved states")
            for file in worker.files:
                usable = "yes" if file.is_usable else "no"
                table.add_row(file.name, str(file.n_tokens), str(file.n_bytes), _date(file.saved_ms), usable)
            console.print(table)


def show_dead_letters(letters: Sequence[DeadLetter]) -> None:
    """One row for each dead letter."""
    table = Table("id", "when (UTC)", "reason")
    table.columns[0].overflow = "fold"  # it is there to be copied
    for letter in letters:
        table.add_row(letter.id, _date(letter.dead_ms), letter.reason)
    console.print(table)


def show_dead_letter(letter: DeadLetterDetails) -> None:
    """One line for each thing that is known of a dead letter, and the request as JSON."""
    table = Table.grid(padding=(0, 2))
    for name in ("id", "reason", "workers", "text", "held"):
        value = getattr(letter, name)
        if value:
            table.add_row(name, Text(" ".join(value) if name == "workers" else value))
    table.add_row("when (UTC)", _date(letter.dead_ms))
    if letter.request is not None:
        table.add_row("request", Text(letter.request.model_dump_json(exclude_defaults=True)))
    elif letter.job_id is not None:
        table.add_row("request", "expired")
    console.print(table)


def _date(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def show_stats(stats: QueueStats) -> None:
    """The queue's depth, its workers, and its last jobs."""
    typer.echo(f"queue {stats.queue}: {stats.depth.waiting} waiting, {stats.depth.running} running")
    show_workers(stats.workers)
    table = Table("worker", "prompt", "generated", "cached", "queue ms", "ttft ms", "ms", "tokens/s", title="last jobs")
    for row in stats.recent[:20]:
        table.add_row(*_stats_row(row))
    console.print(table)


def _stats_row(stats: JobStats) -> list[str]:
    numbers = (stats.queue_ms, stats.ttft_ms, stats.duration_ms, stats.generation_rate)
    return [
        stats.worker or "-",
        str(stats.prompt_tokens),
        str(stats.generated_tokens),
        f"{stats.prefix_cache_ratio:.0%}",
        *("-" if number is None else f"{number:.1f}" for number in numbers),
    ]
