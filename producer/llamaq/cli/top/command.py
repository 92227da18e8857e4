"""The command `llamaq top`, and the output of `--once`: tables for people, one JSON object for programs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from llamaq.cli.columns import show_rows
from llamaq.cli.common_options import MAX_INTERVAL_S, OnlyQueues, RedisUrl
from llamaq.cli.top.header_texts import server_name
from llamaq.cli.top.line_types import Overview
from llamaq.cli.top.live_queues import LiveQueues
from llamaq.cli.top.rates import RateTracker
from llamaq.cli.top.summarize_reading import summarize
from llamaq.cli.top.table import Table
from llamaq.cli.top.table_columns import DEAD, QUEUES, RECENT, SLOTS, WORKERS
from llamaq.common.errors import InvalidRequest, MissingExtra
from llamaq.producer import AsyncClient

MAX_RECENT_ROWS = 20
"""Largest number of rows in the table of recent jobs."""

Interval = Annotated[
    float, typer.Option("--interval", min=0.1, max=MAX_INTERVAL_S, help="Seconds between two readings of Redis.")
]
Once = Annotated[
    bool, typer.Option("--once", help="Print tables and end. Redis is read twice, for the rates between the readings.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --once: print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("top")(top)


def top(
    redis_url: RedisUrl = None,
    queue: OnlyQueues = None,
    interval_s: Interval = 2.0,
    once: Once = False,
    as_json: AsJson = False,
) -> None:
    """Show queues, workers, jobs and dead letters live; pause a queue, cancel a job, retry a dead one."""
    if as_json and not once:
        raise typer.BadParameter("--json needs --once; `llamaq depth --watch --json` prints a line for each reading")
    if once:
        overview = asyncio.run(_read_twice(redis_url, queue or (), interval_s))
        if as_json:
            typer.echo(_to_json(overview, interval_s))
        else:
            _show(overview)
        return
    if importlib.util.find_spec("textual") is None:
        raise MissingExtra("llamaq top", "top")
    if not all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout)):
        raise InvalidRequest("llamaq top needs a terminal; `llamaq top --once` prints tables, with --json for programs")
    raise typer.Exit(asyncio.run(_run(redis_url, queue or (), interval_s)))


def _to_json(overview: Overview, interval_s: float) -> str:
    """Return an overview as one line of JSON. The rates are means over `interval_s` seconds, or null."""
    fields = {"time_ms": overview.now_ms, "interval_s": interval_s, **asdict(overview)}
    del fields["now_ms"]
    return json.dumps(fields)


def _show(overview: Overview) -> None:
    """Print the tables of an overview with whole ids."""
    _show_table(QUEUES, overview, missing="no queue has a job or a worker")
    for table in (WORKERS, SLOTS, RECENT, DEAD):
        if table.lines(overview):
            typer.echo(f"\n{table.title}")
            _show_table(table, overview, missing="")


def _show_table(table: Table, overview: Overview, missing: str) -> None:
    columns = sorted(table.columns, key=lambda column: column.fills)  # columns with ids of any length come last
    rows = [[column.text(line) for column in columns] for line in table.lines(overview)]
    show_rows([column.name for column in columns], rows[:MAX_RECENT_ROWS] if table is RECENT else rows, missing=missing)


async def _read_twice(redis_url: str | None, queues: list[str] | tuple[str, ...], interval_s: float) -> Overview:
    rates = RateTracker()
    async with AsyncClient(redis_url) as client:
        live = LiveQueues(client, queues)
        first = await live.read()
        rates.update(worker for queue in first.queues for worker in queue.workers)
        await asyncio.sleep(interval_s)
        reading = await live.read(with_waiting=True, with_dead=True)
        rates.update(worker for queue in reading.queues for worker in queue.workers)
        return summarize(reading, rates)


async def _run(redis_url: str | None, queues: list[str] | tuple[str, ...], interval_s: float) -> int:
    """Run the view until its user ends it. Returns the exit code."""
    from llamaq.cli.top.app import TopApp

    async with AsyncClient(redis_url) as client:
        view = TopApp(LiveQueues(client, queues), server_name(client.settings.redis_url), interval_s)
        await view.run_async()
        return view.return_code or 0
