"""`llamaq demo`: eight jobs side by side through one batch, in a live view, with everything started for it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, BinaryIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llamaq.common.errors import LlamaqError
from llamaq.common.messages import JobStats
from llamaq.producer import AsyncClient
from llamaq.worker.embedded import EmbeddedRedis
from llamaq.worker.settings import WorkerSettings, load_settings
from llamaq.worker.stack import end_on_sigterm
from llamaq.worker.supervisor import Supervisor

START_TIMEOUT_S = 60.0
JOB_TIMEOUT_S = 120.0
COLUMNS = 2
PANEL_LINES = 5
LINE_CHARS = 72


@dataclass(slots=True)
class Stream:
    """One job of the demo, as the view shows it."""

    title: str
    params: dict[str, Any]
    text: str = ""
    shown: int = 0
    """Characters that were printed, where there is no live view."""
    stats: JobStats | None = None
    reason: str = ""


def demo_streams(count: int) -> list[Stream]:
    """The jobs that ship with the demo model, repeated when more are asked for."""
    prompts = json.loads(files("llamaq.worker").joinpath("model", "demo_prompts.json").read_text())
    streams = []
    for index in range(count):
        params = dict(prompts[index % len(prompts)])
        streams.append(Stream(params.pop("title"), {**params, "temperature": 0.0}))
    return streams


def show(count: int, model: str | None) -> int:
    """Run the demo; returns the exit code. Leaves no process behind, also when it is interrupted."""
    console = Console()
    # A model this small computes a tick in less time than two threads need to agree on it.
    n_threads = 1 if model is None else None
    settings = load_settings(model=model, n_parallel=min(count, 8), n_threads=n_threads)
    what = "the small model that ships with llamaq" if model is None else model
    console.print(f"{count} jobs, one worker with {settings.n_parallel} slots, {what}.")
    with tempfile.TemporaryFile() as log_file:
        try:
            with end_on_sigterm():
                streams = _run(console, settings, log_file, demo_streams(count))
        except KeyboardInterrupt:
            console.print("Interrupted; everything that was started has been stopped.")
            return 130
        except LlamaqError as exc:
            console.print(f"[red]{type(exc).__name__}[/]: {exc}")
            log_file.seek(0)
            console.print(log_file.read().decode(errors="replace")[-2000:], markup=False)
            return 1
    console.print(stats_table(streams))
    return 0


def _run(console: Console, settings: WorkerSettings, log_file: BinaryIO, streams: list[Stream]) -> list[Stream]:
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        supervisor = Supervisor([settings.model_copy(update={"redis_url": redis.url})], log_file)
        stack.callback(supervisor.stop)
        supervisor.start()
        asyncio.run(_watch(console, redis.url, supervisor, streams))
    return streams


async def _watch(console: Console, url: str, supervisor: Supervisor, streams: list[Stream]) -> None:
    async with AsyncClient(url=url) as client:
        with console.status("Loading the model …") if console.is_terminal else nullcontext():
            await _wait_for_worker(client, supervisor)
        live = Live(console=console, refresh_per_second=15, get_renderable=partial(view, streams))
        with live if console.is_terminal else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(_follow(console, client, stream))


async def _wait_for_worker(client: AsyncClient, supervisor: Supervisor) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await client.workers():
            if supervisor.check() is not None:
                raise LlamaqError("the worker cannot start; its log:")
            await asyncio.sleep(0.05)


async def _follow(console: Console, client: AsyncClient, stream: Stream) -> None:
    """Submit one job and show what comes."""
    job = await client.submit(**stream.params)
    async for chunk in job.stream():
        stream.text += chunk.text
        if not console.is_terminal and len(stream.text) - stream.shown >= LINE_CHARS:
            _print_line(console, stream)
    if not console.is_terminal:
        _print_line(console, stream)
    result = await job.result(timeout=JOB_TIMEOUT_S)
    stream.stats, stream.reason = result.stats, result.finish_reason.value


def _print_line(console: Console, stream: Stream) -> None:
    line = stream.text[stream.shown :].replace("\n", " ").strip()
    stream.shown = len(stream.text)
    if line:
        console.print(f"{stream.title:>16} | {line}", markup=False, highlight=False, soft_wrap=True)


def view(streams: Sequence[Stream]) -> Table:
    """All jobs as panels, two side by side, each with the end of its text."""
    grid = Table.grid(expand=True)
    for _ in range(COLUMNS):
        grid.add_column(ratio=1)
    panels = [_panel(stream) for stream in streams]
    for start in range(0, len(panels), COLUMNS):
        grid.add_row(*panels[start : start + COLUMNS])
    return grid


def _panel(stream: Stream) -> Panel:
    width = max(20, Console().width // COLUMNS - 4)
    lines = Text(stream.text).wrap(Console(), width)[-PANEL_LINES:]
    style = "green" if stream.stats else "cyan"
    return Panel(Text("\n").join(lines), title=stream.title, height=PANEL_LINES + 2, border_style=style)


def stats_table(streams: Sequence[Stream]) -> Table:
    """Each job's stats."""
    table = Table(title="Stats")
    for name in ("job", "prompt", "generated", "finish", "queue ms", "ttft ms", "duration ms", "tokens/s", "slot"):
        table.add_column(name, justify="left" if name in ("job", "finish") else "right")
    for stream in streams:
        if stats := stream.stats:
            table.add_row(
                stream.title,
                str(stats.prompt_tokens),
                str(stats.generated_tokens),
                stream.reason,
                f"{stats.queue_ms:.0f}",
                f"{stats.ttft_ms or 0:.1f}",
                f"{stats.duration_ms:.0f}",
                f"{stats.generation_rate or 0:.0f}",
                str(stats.slot),
            )
    return table
