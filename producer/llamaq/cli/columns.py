"""Text for terminals. Rows are printed as columns. No cell is ever cut, so that ids can be copied."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TextIO

import typer
from rich.cells import cell_len

from llamaq.common.logging_setup import CONTROLS

GAP = "  "


def visible(text: str) -> str:
    """Return a text that cannot control the terminal: any client of Redis may have written it."""
    return text.translate(CONTROLS).replace("\n", "\\x0a")


def replace_unencodable_in_terminal(stream: TextIO | None) -> None:
    """Let a terminal show `?` for characters that its encoding does not have.

    In a file or a pipe they are an error, because a program would not notice that characters are missing.
    """
    if stream is not None and not stream.closed and stream.isatty():
        replace_unencodable(stream)


def replace_unencodable(stream: TextIO | None) -> None:
    """Let an output contain `?` for characters that its encoding does not have."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")


def show_rows(names: Sequence[str], rows: Sequence[Sequence[str]], *, missing: str) -> None:
    """Print rows under their column names. A terminal that is too narrow for the columns gets one block per row.

    Args:
        names: The names of the columns.
        rows: The cells of each row. The last cell of a row may be longer than the terminal is wide.
        missing: Printed if there are no rows.
    """
    width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None
    typer.echo("\n".join(format_rows(names, rows, width)) if rows else missing)


def format_rows(names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the lines of a table: columns if all columns but the last fit into `width`, otherwise one block per row.

    A longer cell in the last column continues on the next line of the terminal, which does not cut it.

    Args:
        names: The names of the columns.
        rows: The cells of each row.
        width: The width of the terminal. None: the output is not a terminal, so lines have any length.
    """
    lines = [names, *([visible(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    if width is not None and len(GAP.join(" " * cells for cells in widths[:-1])) > width:
        return format_blocks(names, lines[1:])
    return [GAP.join(map(_pad, line, widths)).rstrip() for line in lines]


def format_blocks(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one block of lines for each row, with one line for each cell. Blank lines separate the blocks."""
    width = max(map(cell_len, names))
    blocks = [[GAP.join((_pad(name, width), cell)) for name, cell in zip(names, row, strict=True)] for row in rows]
    return [line for block in blocks for line in ("", *block)][1:]


def show_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print the name and the value of each field in one line."""
    names, values = zip(*((name, value.translate(CONTROLS)) for name, value in fields), strict=True)
    typer.echo("\n".join(format_blocks(names, [values])))


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))
