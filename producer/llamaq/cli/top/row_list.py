"""A list of rows under their column titles. It draws only the rows that are on the screen, so any number is fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from llamaq.cli.top.line_types import QueueLine, RecentLine, WorkerLine
from llamaq.cli.top.table import Line, Order, Table, layout, row_text
from llamaq.common.protocol.queue_config import QueueMode

HEADER_LINES = 1
LATE_HEARTBEAT_S = 5.0
"""If the last heartbeat of a worker is older than this, the worker hangs or cannot reach Redis."""


class RowList(Widget, can_focus=True):
    """Shows the lines of one table, with a cursor."""

    DEFAULT_CSS = """
    RowList { height: 1fr; }
    RowList > .row-list--title { text-style: bold; color: $text-muted; }
    RowList > .row-list--cursor { background: $surface-lighten-2; }
    RowList:focus > .row-list--cursor { background: $primary; color: $text; text-style: bold; }
    RowList > .row-list--warning { color: $text-warning; }
    RowList > .row-list--error { color: $text-error; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "row-list--title",
        "row-list--cursor",
        "row-list--warning",
        "row-list--error",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "jump(0)", show=False),
        Binding("end", "jump(-1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another line now, or the lines have changed."""

        def __init__(self, rows: RowList) -> None:
            super().__init__()
            self.rows = rows

        @property
        def control(self) -> RowList:
            """The list."""
            return self.rows

    class Chosen(Moved):
        """Enter was pressed on the line of the cursor."""

    def __init__(self, table: Table, *, id: str) -> None:  # noqa: A002 - the name that textual uses
        super().__init__(id=id)
        self.table = table
        self.lines: Sequence[Line] = ()
        self.order = Order()
        self._cursor = 0
        self._first = 0
        """Index of the first line on the screen."""

    @property
    def selected(self) -> Line | None:
        """The line of the cursor. None: there are no lines."""
        return self.lines[self._cursor] if self.lines else None

    @property
    def place(self) -> str:
        """Which lines are on the screen, such as `1-14 of 200`. Empty if all are."""
        n_shown = self._n_shown
        if len(self.lines) <= n_shown:
            return ""
        return f"{self._first + 1}-{min(len(self.lines), self._first + n_shown)} of {len(self.lines)}"

    @property
    def _n_shown(self) -> int:
        return max(1, self.size.height - HEADER_LINES)

    def show(self, table: Table, lines: Sequence[Line], order: Order) -> None:
        """Show these lines. The cursor follows its line. If that line is gone, the cursor keeps its position."""
        selected = self.selected
        if table is not self.table:
            selected, self._cursor, self._first = None, 0, 0
        self.table, self.lines, self.order = table, lines, order
        if selected is not None:
            key = table.key(selected)
            found = (index for index, line in enumerate(lines) if table.key(line) == key)
            self._cursor = next(found, self._cursor)
        self._move_to(self._cursor)

    def action_move(self, n_lines: int) -> None:
        """Move the cursor by some lines."""
        self._move_to(self._cursor + n_lines)

    def action_page(self, n_pages: int) -> None:
        """Move the cursor by some screens."""
        self._move_to(self._cursor + n_pages * self._n_shown)

    def action_jump(self, index: int) -> None:
        """Move the cursor to the first line (0) or the last one (-1)."""
        self._move_to(index % max(1, len(self.lines)))

    def action_choose(self) -> None:
        """Report that Enter was pressed."""
        if self.lines:
            self.post_message(self.Chosen(self))

    def _move_to(self, index: int) -> None:
        self._cursor = max(0, min(index, len(self.lines) - 1))
        last_first = max(0, len(self.lines) - self._n_shown)
        self._first = min(max(self._first, self._cursor - self._n_shown + 1), self._cursor, last_first)
        self.refresh()
        self.post_message(self.Moved(self))

    def on_resize(self) -> None:
        """Keep the line of the cursor on the screen."""
        self._move_to(self._cursor)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the line that was clicked."""
        if event.y >= HEADER_LINES:
            self._move_to(self._first + event.y - HEADER_LINES)

    def on_mouse_scroll_down(self) -> None:
        """Move the cursor down."""
        self._move_to(self._cursor + 1)

    def on_mouse_scroll_up(self) -> None:
        """Move the cursor up."""
        self._move_to(self._cursor - 1)

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        width = self.size.width
        index = self._first + y - HEADER_LINES
        if y >= HEADER_LINES and index >= len(self.lines):
            return Strip.blank(width, self.rich_style)
        line = None if y < HEADER_LINES else self.lines[index]
        text = row_text(layout(self.table.columns, width), line)
        return Strip([Segment(text, self._style(index, line))]).adjust_cell_length(width, self.rich_style)

    def _style(self, index: int, line: Line | None) -> Style:
        base = self.rich_style
        if line is None:
            return base + self.get_component_rich_style("row-list--title", partial=True)
        style = base + _warning_style(self, line)
        return (
            style + self.get_component_rich_style("row-list--cursor", partial=True) if index == self._cursor else style
        )


def _warning_style(rows: RowList, line: Line) -> Style:
    """Return the style of a line that needs attention."""
    match line:
        case QueueLine() if line.mode != QueueMode.OPEN:
            name = "row-list--warning"
        case WorkerLine() if line.heartbeat_age_s > LATE_HEARTBEAT_S:
            name = "row-list--warning"
        case RecentLine() if line.has_failed:
            name = "row-list--error"
        case _:
            return Style.null()
    return rows.get_component_rich_style(name, partial=True)
