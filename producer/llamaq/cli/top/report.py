"""The output of `llamaq top --once`: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

from llamaq.cli.columns import show_rows
from llamaq.cli.top.line_types import Overview
from llamaq.cli.top.table import Table
from llamaq.cli.top.table_columns import DEAD, QUEUES, RECENT, SLOTS, WORKERS

MAX_RECENT_ROWS = 20
"""Largest number of rows in the table of recent jobs."""


def to_json(overview: Overview, interval_s: float) -> str:
    """Return an overview as one line of JSON. The rates are means over `interval_s` seconds, or null."""
    fields: dict[str, Any] = {"time_ms": overview.now_ms, "interval_s": interval_s, **asdict(overview)}
    del fields["now_ms"]
    return json.dumps(fields)


def show(overview: Overview) -> None:
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
