"""The tables of the view, with the columns of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamaq.cli.top.formats import format_bytes, format_duration, format_ms, format_number, format_rate, format_share
from llamaq.cli.top.line_types import QueueLine, SlotLine, WorkerLine
from llamaq.cli.top.table import Column, Table


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda line: getattr(line, name)


def _text(name: str, attribute: str, width: int, *, fills: bool = False, rank: int = 0) -> Column:
    read = _attribute(attribute)
    return Column(name, lambda line: str(read(line) or "-"), read, width, fills, is_text=True, rank=rank)


def _number(
    name: str, attribute: str, width: int, text: Callable[[Any], str] = format_number, *, rank: int = 0
) -> Column:
    read = _attribute(attribute)
    return Column(name, lambda line: text(read(line)), read, width, rank=rank)


def _slots(line: QueueLine | WorkerLine) -> str:
    return f"{line.busy_slots}/{line.slots}"


def _batch(line: WorkerLine) -> str:
    if line.decode_per_tick is None or line.prefill_per_tick is None:
        return "-"
    return f"{line.decode_per_tick:.0f}+{line.prefill_per_tick:.0f}"


def _cells(line: WorkerLine) -> float:
    return line.used_cells / max(1, line.cells)


def _reused(line: SlotLine) -> float:
    return line.cached_tokens / max(1, line.prompt_tokens)


def _queue_detail(line: QueueLine) -> str:
    parts = [", ".join(line.models) or "no worker", f"{line.delayed} delayed", f"{line.dead_letters} dead letters"]
    if line.tenants:
        waiting = ", ".join(f"{one.tenant or 'none'} {one.waiting}" for one in line.tenants)
        parts.append(f"waiting by tenant: {waiting}")
    return f"{line.queue}: {'; '.join(parts)}"


QUEUES = Table(
    "queues",
    (
        _text("queue", "queue", 11, fills=True),
        _text("mode", "mode", 8),
        _number("waiting", "waiting", 7),
        _number("running", "running", 7),
        _number("delayed", "delayed", 7, rank=3),
        _number("oldest", "oldest_waiting_s", 6, format_duration),
        _number("jobs/s", "jobs_per_s", 6, format_rate),
        _number("ETA", "eta_s", 5, format_duration),
        _number("tok/s", "tokens_per_s", 6, format_rate),
        Column("slots", _slots, _attribute("busy_slots"), 8),
        _number("workers", "workers", 7),
        _number("dead", "dead_letters", 5, rank=4),
        Column("tenants", lambda line: str(len(line.tenants)), lambda line: len(line.tenants), 7, rank=5),
    ),
    lines=lambda overview: (overview.total, *overview.queues) if len(overview.queues) > 1 else overview.queues,
    key=_attribute("queue"),
    detail=_queue_detail,
)
WORKERS = Table(
    "workers",
    (
        _text("worker", "worker", 13, fills=True),
        _text("queue", "queue", 10, rank=6),
        Column("slots", _slots, _attribute("busy_slots"), 7),
        _number("tok/s", "tokens_per_s", 6, format_rate),
        _number("prompt/s", "prompt_tokens_per_s", 8, format_rate, rank=5),
        _number("tick ms", "tick_ms", 7, format_ms),
        Column("batch", _batch, _attribute("decode_per_tick"), 7),
        Column("cells", lambda line: format_share(_cells(line)), _cells, 5),
        _number("hits", "hit_ratio", 5, format_share),
        _number("seqs", "cached_sequences", 4),
        _number("host", "host_bytes", 5, format_bytes),
        _number("disk", "disk_bytes", 5, format_bytes),
        _number("beat", "heartbeat_age_s", 4, format_duration),
        _number("jobs", "jobs_done", 6, rank=4),
    ),
    lines=lambda overview: overview.workers,
    key=_attribute("worker"),
    detail=lambda line: (
        f"{line.worker}: {line.model} on {line.host} ({line.device}), queue {line.queue}, "
        f"{line.used_cells}/{line.cells} cells, {line.jobs_done} jobs done"
    ),
)
SLOTS = Table(
    "slots",
    (
        _text("worker", "worker", 10, fills=True),
        _number("slot", "slot", 4, str),
        _text("state", "state", 7),
        _text("job", "job_id", 14, fills=True),
        _number("prompt", "prompt_tokens", 6),
        Column("cached", lambda line: format_share(_reused(line)), _reused, 6),
        _number("filled", "prefilled_tokens", 6),
        _number("new", "generated_tokens", 6),
        _number("tok/s", "tokens_per_s", 6, format_rate),
    ),
    lines=lambda overview: overview.slots,
    key=_attribute("job_id"),
    detail=lambda line: f"{line.job_id} in slot {line.slot} of {line.worker}",
)
WAITING = Table(
    "waiting",
    (
        _text("job", "job_id", 20, fills=True),
        _text("priority", "priority", 11),
        _text("tenant", "tenant", 12, rank=3),
        _number("age", "age_s", 5, format_duration),
        _number("attempt", "attempt", 7, str),
        _number("new", "generated_tokens", 6),
        Column("due", lambda line: "later" if line.is_delayed else "now", _attribute("is_delayed"), 5, is_text=True),
    ),
    lines=lambda overview: overview.waiting,
    key=_attribute("job_id"),
    detail=lambda line: (
        f"{line.job_id}{f', claimed by {line.worker}' if line.worker else ''}"
        f"{', cancelled' if line.cancel_requested else ''}"
    ),
)
RECENT = Table(
    "recent",
    (
        _text("end", "end", 9),
        _number("ago", "age_s", 4, format_duration),
        _number("prompt", "prompt_tokens", 6),
        _number("cached", "cached_ratio", 6, format_share),
        _number("new", "generated_tokens", 6),
        _number("queue ms", "queue_ms", 8, format_ms),
        _number("TTFT ms", "ttft_ms", 7, format_ms),
        _number("tok/s", "tokens_per_s", 6, format_rate),
        _text("job", "job_id", 16, fills=True),
    ),
    lines=lambda overview: overview.recent,
    key=_attribute("job_id"),
    detail=lambda line: f"{line.job_id}: {line.end}{f' on {line.worker}' if line.worker else ''}",
)
DEAD = Table(
    "dead",
    (
        _number("ago", "age_s", 4, format_duration),
        _text("job", "letter_id", 20, fills=True),
        _text("reason", "reason", 30, fills=True),
    ),
    lines=lambda overview: overview.dead,
    key=_attribute("letter_id"),
    detail=lambda line: f"{line.letter_id}: {line.reason}",
)
PAGES = (WORKERS, SLOTS, WAITING, RECENT, DEAD)
"""The tables below the table of queues, one of which is shown."""
