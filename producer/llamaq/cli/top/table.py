"""A table of the view: columns, order, filter and layout. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from llamaq.cli.top.formats import elide
from llamaq.cli.top.line_types import DeadLine, Overview, QueueLine, RecentLine, SlotLine, WaitingLine, WorkerLine

Line = QueueLine | WorkerLine | SlotLine | WaitingLine | RecentLine | DeadLine


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: The title.
        text: Returns the text of the cell of a line.
        value: Returns the value by which lines are sorted. None: the value is not known, and the line comes last.
        width: The width in characters. For a column that fills the free space, its smallest width.
        fills: Whether the column fills the free space. Its text may be shortened in the middle.
        is_text: Whether the cell is text. Text is left-aligned and sorted in ascending order first; numbers are
            right-aligned and sorted in descending order first.
        rank: Columns with a higher rank are left out first when the terminal is too narrow.
    """

    name: str
    text: Callable[[Any], str]
    value: Callable[[Any], Any]
    width: int
    fills: bool = False
    is_text: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the view.

    Attributes:
        title: The name of the table.
        columns: All columns, from left to right.
        lines: Returns the lines of an overview.
        key: Returns the id of a line, by which it is found again after a refresh.
        detail: Returns one line of text about a line: what the columns shorten or leave out.
    """

    title: str
    columns: tuple[Column, ...]
    lines: Callable[[Overview], Sequence[Any]]
    key: Callable[[Any], str]
    detail: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Order:
    """How the lines of a table are sorted. Without a column they stay in the order of the overview."""

    column: str | None = None
    is_reversed: bool = False

    def next_of(self, table: Table) -> Order:
        """Return the order by the next column of the table; after the last column, the order of the overview."""
        names = [None, *(column.name for column in table.columns)]
        place = names.index(self.column) if self.column in names else 0
        return Order(names[(place + 1) % len(names)])


def select(table: Table, overview: Overview, *, queue: str | None, text: str, order: Order) -> list[Line]:
    """Return the lines of a table that match the filter, sorted.

    Args:
        table: The table.
        overview: The lines of all tables.
        queue: Only the lines of this queue. None: of all queues.
        text: Only lines that contain this text in a cell or in the detail, in any case.
        order: The order of the lines.
    """
    lines = [line for line in table.lines(overview) if queue is None or line.queue == queue]
    if text:
        lowered = text.lower()
        lines = [line for line in lines if lowered in _searched_text(table, line)]
    column = next((column for column in table.columns if column.name == order.column), None)
    if column is None:
        return lines[::-1] if order.is_reversed else lines
    known = [line for line in lines if column.value(line) is not None]
    known.sort(key=column.value, reverse=column.is_text == order.is_reversed)
    return known + [line for line in lines if column.value(line) is None]


def _searched_text(table: Table, line: Line) -> str:
    return "\n".join((*(column.text(line) for column in table.columns), table.detail(line))).lower()


def layout(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit into a width, and the width of each. Columns are separated by one space."""
    shown = list(columns)
    while len(shown) > 1 and sum(column.width + 1 for column in shown) - 1 > width:
        shown.remove(max(reversed(shown), key=lambda column: column.rank))
    free = max(0, width - (sum(column.width + 1 for column in shown) - 1))
    n_filling = sum(column.fills for column in shown)
    widths = []
    for column in shown:
        extra = -(-free // n_filling) if column.fills else 0
        free, n_filling = free - extra, n_filling - column.fills
        widths.append((column, column.width + extra))
    return widths


def row_text(columns: Iterable[tuple[Column, int]], line: Line | None) -> str:
    """Return a line of text with the cells of a line; without a line, with the titles."""
    cells = []
    for column, width in columns:
        text = column.name if line is None else column.text(line)
        shortened = elide(text, width)
        padding = " " * (width - cell_len(shortened))
        cells.append(shortened + padding if column.is_text else padding + shortened)
    return " ".join(cells)
