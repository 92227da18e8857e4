"""What `llamaq demo` shows: every job in a panel of its own while they run, and a table of their stats at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llamaq.common.messages import JobStats, Worker

COLUMN_CHARS = 40
"""As many panels stand side by side as have at least this width, but no more than `MAX_COLUMNS`."""
MAX_COLUMNS = 4
MIN_PANEL_LINES, MAX_PANEL_LINES = 3, 10
FOOTER_LINES = 2
"""The footer, and the line that the cursor is on."""


@dataclass(slots=True)
class Stream:
    """One job of the demo, as the view shows it."""

    title: str
    params: dict[str, Any]
    text: str = ""
    n_tokens: int = 0
    n_printed: int = 0
    """Characters that were printed, where there is no live view."""
    stats: JobStats | None = None
    ending: str = ""
    """The finish reason, or why it failed."""

    @property
    def prompt(self) -> str:
        """What was asked: the prompt, or the last message of the chat."""
        return str(self.params.get("prompt") or self.params["messages"][-1]["content"])

    @property
    def has_failed(self) -> bool:
        return bool(self.ending) and self.stats is None


@dataclass(slots=True)
class View:
    """All jobs as panels of equal size, as many as the terminal has room for, above one line about the worker."""

    streams: Sequence[Stream]
    worker: Worker | None = None
    """As last seen."""
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def n_tokens(self) -> int:
        return sum(stream.n_tokens for stream in self.streams)

    @property
    def elapsed_s(self) -> float:
        return max(1e-3, (self.ended_s or time.monotonic()) - self.started_s)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        n_columns = max(1, min(MAX_COLUMNS, console.width // COLUMN_CHARS, len(self.streams)))
        n_rows = -(-len(self.streams) // n_columns)
        room = console.height - FOOTER_LINES
        height = max(MIN_PANEL_LINES, min(MAX_PANEL_LINES, room // n_rows))
        shown = list(self.streams)
        if n_rows * height > room:  # those that have ended make room for the others
            shown = sorted(shown, key=lambda stream: bool(stream.ending))[: max(1, room // height) * n_columns]
        grid = Table.grid(expand=True)
        for _ in range(n_columns):
            grid.add_column(ratio=1)
        width = console.width // n_columns
        for start in range(0, len(shown), n_columns):
            grid.add_row(*(panel(stream, console, width, height) for stream in shown[start : start + n_columns]))
        yield grid
        yield Text(self.footer(), style="bold", no_wrap=True, overflow="ellipsis")

    def footer(self) -> str:
        """The worker and the rate of all jobs together, in one line."""
        parts = [f"{self.n_tokens} tokens", f"{self.elapsed_s:.1f} s", f"{self.n_tokens / self.elapsed_s:.0f} tokens/s"]
        if self.worker is not None and self.ended_s is None:
            busy = sum(slot.job_id is not None for slot in self.worker.slots)
            parts.append(f"{busy}/{self.worker.card.n_parallel} slots")
            if (tick := self.worker.last_tick) is not None:
                parts.append(f"a batch of {tick.batch_size} in {tick.eval_ms:.1f} ms")
        return " " + " · ".join(parts)


def panel(stream: Stream, console: Console, width: int, height: int) -> Panel:
    """One job: the end of its text after what it was asked, and how far it is."""
    text = Text(stream.prompt.strip(), style="dim")
    if stream.text:
        text.append(" " if "prompt" in stream.params else "\n")
        text.append(stream.text.strip(), style="not dim")
    lines = text.wrap(console, width - 4)[-(height - 2) :]
    state = stream.ending or ("running" if stream.n_tokens else "waiting")
    style = "red" if stream.has_failed else {"waiting": "dim", "running": "cyan"}.get(state, "green")
    return Panel(
        Text("\n").join(lines),
        title=Text(stream.title, style="bold"),
        title_align="left",
        subtitle=Text(f"{state}, {stream.n_tokens} tokens"),
        subtitle_align="right",
        height=height,
        border_style=style,
    )


def stats_table(streams: Sequence[Stream]) -> Table:
    """Each job's stats, narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("job", no_wrap=True, max_width=20)
    for name in ("prompt\ntokens", "new\ntokens", "queue\nms", "ttft\nms", "total\nms", "tokens\n/s", "slot"):
        table.add_column(name, justify="right")
    table.add_column("finish", no_wrap=True)
    for stream in streams:
        table.add_row(Text(stream.title), *_numbers(stream.stats), Text(stream.ending))
    return table


def _numbers(stats: JobStats | None) -> list[str]:
    if stats is None:
        return [""] * 7
    times = (stats.queue_ms, stats.ttft_ms, stats.duration_ms, stats.generation_rate)
    shown = ["-" if value is None else f"{value:.0f}" for value in times]
    return [str(stats.prompt_tokens), str(stats.generated_tokens), *shown, str(stats.slot)]
