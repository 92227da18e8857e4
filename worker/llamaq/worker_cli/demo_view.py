"""The view of `llamaq demo`: a panel for each job while the jobs run, and a table of their stats at the end."""

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

from llamaq.producer import JobStats, Worker

MIN_COLUMN_CHARS = 40
"""Smallest width of a panel. It decides how many panels fit side by side."""
MAX_COLUMNS = 4
MIN_PANEL_LINES, MAX_PANEL_LINES = 3, 10
FOOTER_LINES = 2
"""Number of lines below the panels: the footer and the line of the cursor."""


@dataclass(slots=True)
class DemoJob:
    """One job of the demo, and the values that its panel shows."""

    title: str
    params: dict[str, Any]
    """Arguments of `AsyncClient.submit`."""
    text: str = ""
    """The text generated so far."""
    n_tokens: int = 0
    """Number of tokens generated so far."""
    n_printed_chars: int = 0
    """Number of characters of `text` that were already printed. Used only if the output is not a terminal."""
    stats: JobStats | None = None
    """The stats of the finished job. None while the job runs, and if it failed."""
    ending: str = ""
    """The finish reason or the error code. Empty while the job runs."""

    @property
    def prompt(self) -> str:
        """The prompt, or the last message of the chat."""
        return str(self.params.get("prompt") or self.params["messages"][-1]["content"])

    @property
    def has_failed(self) -> bool:
        """Whether the job ended without stats."""
        return bool(self.ending) and self.stats is None


@dataclass(slots=True)
class DemoView:
    """The jobs as panels of equal size, as many as fit in the terminal. A line about the worker follows the panels."""

    jobs: Sequence[DemoJob]
    worker: Worker | None = None
    """The worker's last heartbeat. None until the worker is ready."""
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens that all jobs have generated so far."""
        return sum(job.n_tokens for job in self.jobs)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first submit, at least one millisecond."""
        return max(1e-3, (self.ended_s or time.monotonic()) - self.started_s)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        n_columns = max(1, min(MAX_COLUMNS, console.width // MIN_COLUMN_CHARS, len(self.jobs)))
        n_rows = -(-len(self.jobs) // n_columns)
        n_lines = console.height - FOOTER_LINES
        height = max(MIN_PANEL_LINES, min(MAX_PANEL_LINES, n_lines // n_rows))
        shown = list(self.jobs)
        if n_rows * height > n_lines:  # not all fit: running jobs are shown first
            shown = sorted(shown, key=lambda job: bool(job.ending))[: max(1, n_lines // height) * n_columns]
        grid = Table.grid(expand=True)
        for _ in range(n_columns):
            grid.add_column(ratio=1)
        width = console.width // n_columns
        for start in range(0, len(shown), n_columns):
            grid.add_row(*(panel(job, console, width, height) for job in shown[start : start + n_columns]))
        yield grid
        yield Text(self.footer(), style="bold", no_wrap=True, overflow="ellipsis")

    def footer(self) -> str:
        """Return one line: the number and rate of tokens of all jobs, and the worker's slots and last batch."""
        parts = [f"{self.n_tokens} tokens", f"{self.elapsed_s:.1f} s", f"{self.n_tokens / self.elapsed_s:.0f} tokens/s"]
        if self.worker is not None and self.ended_s is None:
            busy = sum(slot.job_id is not None for slot in self.worker.slots)
            parts.append(f"{busy}/{self.worker.card.n_parallel} slots")
            if (tick := self.worker.last_tick) is not None:
                parts.append(f"a batch of {tick.batch_size} in {tick.eval_ms:.1f} ms")
        return " " + " · ".join(parts)


def panel(job: DemoJob, console: Console, width: int, height: int) -> Panel:
    """Return the panel of one job: the last lines of its prompt and text, and its progress.

    Args:
        job: The job.
        console: Where the panel is drawn.
        width: The width of the panel in characters, borders included.
        height: The height of the panel in lines, borders included.
    """
    text = Text(job.prompt.strip(), style="dim")
    if job.text:
        text.append(" " if "prompt" in job.params else "\n")
        text.append(job.text.strip(), style="not dim")
    lines = text.wrap(console, width - 4)[-(height - 2) :]
    state = job.ending or ("running" if job.n_tokens else "waiting")
    style = "red" if job.has_failed else {"waiting": "dim", "running": "cyan"}.get(state, "green")
    return Panel(
        Text("\n").join(lines),
        title=Text(job.title, style="bold"),
        title_align="left",
        subtitle=Text(f"{state}, {job.n_tokens} tokens"),
        subtitle_align="right",
        height=height,
        border_style=style,
    )


def stats_table(jobs: Sequence[DemoJob]) -> Table:
    """Return a table with the stats of each job. It fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("job", no_wrap=True, max_width=20)
    for name in ("prompt\ntokens", "new\ntokens", "queue\nms", "ttft\nms", "total\nms", "tokens\n/s", "slot"):
        table.add_column(name, justify="right")
    table.add_column("finish", no_wrap=True)
    for job in jobs:
        table.add_row(Text(job.title), *_stats_cells(job.stats), Text(job.ending))
    return table


def _stats_cells(stats: JobStats | None) -> list[str]:
    if stats is None:
        return [""] * 7
    times = (stats.queue_ms, stats.ttft_ms, stats.duration_ms, stats.generation_rate)
    cells = ["-" if value is None else f"{value:.0f}" for value in times]
    return [str(stats.prompt_tokens), str(stats.generated_tokens), *cells, str(stats.slot)]
