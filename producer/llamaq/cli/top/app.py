"""The screen of `llamaq top`. What it shows is decided in `overview` and `table`; `live_queues` reads and acts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

from redis.exceptions import RedisError
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, Static

from llamaq.cli.columns import visible
from llamaq.cli.error_report import explain
from llamaq.cli.exit_codes import EXIT_INTERRUPTED
from llamaq.cli.top.dialogs import Question
from llamaq.cli.top.header_texts import pages_text, status_text
from llamaq.cli.top.line_types import Overview, QueueLine, WorkerLine
from llamaq.cli.top.rates import RateTracker
from llamaq.cli.top.row_list import RowList
from llamaq.cli.top.summarize_reading import summarize
from llamaq.cli.top.table import Order, Table, select
from llamaq.cli.top.table_columns import DEAD, PAGES, QUEUES, SLOTS, WAITING, WORKERS
from llamaq.cli.top.user_actions import Command, Queues, cancel_job, pause_or_resume, retry_letter
from llamaq.common.errors import LlamaqError

MAX_QUEUE_LINES = 8
"""Largest number of lines of the table of queues, its title included."""


class TopApp(App[None]):
    """A live view of all queues, workers, jobs and dead letters.

    Args:
        queues: Reads and acts.
        server: The name of the Redis server, for the first line.
        interval_s: Seconds between two readings.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status { height: 1; text-style: bold; }
    #queues { height: 3; max-height: 8; }
    #pages { height: 1; margin-top: 1; }
    #rows { height: 1fr; }
    #detail { height: 1; color: $text-muted; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("tab", "app.focus_next", "Table", show=False),
        *(Binding(str(number), f"page({number})", show=False) for number in range(1, len(PAGES) + 1)),
        Binding("left", "next_page(-1)", show=False),
        Binding("right", "next_page(1)", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "clear_filter", show=False),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", key_display="S"),
        Binding("p", "pause", "Pause/resume"),
        Binding("c", "cancel", "Cancel job"),
        Binding("t", "retry", "Retry"),
    ]

    def __init__(self, queues: Queues, server: str, interval_s: float) -> None:
        super().__init__()
        self._queues = queues
        self._server = server
        self._interval_s = interval_s
        self._rates = RateTracker()
        self.overview: Overview | None = None
        """What the last reading shows. None: Redis has not answered yet."""
        self._error = ""
        self._page = WORKERS
        self._orders: dict[str, Order] = {}
        self._filter = ""
        self._wake = asyncio.Event()
        # The widgets are kept, because a search for widgets only finds those of the topmost screen, and a question is a
        # separate screen.
        self._status = Static(id="status", markup=False)
        self._queue_rows = RowList(QUEUES, id="queues")
        self._pages = Static(id="pages")
        self._rows = RowList(self._page, id="rows")
        self._detail = Static(id="detail", markup=False)
        self._filter_input = Input(id="filter", placeholder="text that the lines contain")

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        yield self._status
        yield self._queue_rows
        yield self._pages
        yield self._rows
        yield self._detail
        yield self._filter_input
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Start to read the queues."""
        self._rows.focus()
        self._show()
        self.run_worker(self._read_forever(), exit_on_error=True)

    # ---- reading

    async def _read_forever(self) -> None:
        while True:
            await self._read()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval_s)
            self._wake.clear()

    async def _read(self) -> None:
        """Read the queues and show them. Without an answer of Redis, the last reading stays on the screen."""
        try:
            reading = await self._queues.read(with_waiting=self._page is WAITING, with_dead=self._page is DEAD)
        except (LlamaqError, RedisError) as exc:
            self._error = explain(exc)
        else:
            self._error = ""
            self._rates.update(worker for queue in reading.queues for worker in queue.workers)
            self.overview = summarize(reading, self._rates)
        self._show()

    # ---- showing

    @property
    def _selected_queue(self) -> QueueLine | None:
        """The queue of the cursor. None: all queues."""
        line = self._queue_rows.selected
        overview = self.overview
        return line if isinstance(line, QueueLine) and (overview is None or line is not overview.total) else None

    def _show(self) -> None:
        """Show the last reading."""
        if not self.screen_stack:  # the view ends
            return
        overview = self.overview
        self._status.update(status_text(self._server, overview, self._error))
        if overview is None:
            return
        lines = select(QUEUES, overview, queue=None, text="", order=Order())
        self._queue_rows.styles.height = min(MAX_QUEUE_LINES, len(lines) + 1)
        self._queue_rows.show(QUEUES, lines, Order())
        self._show_rows()

    def _show_rows(self) -> None:
        overview = self.overview
        if overview is None:
            return
        queue, order = self._selected_queue, self._orders.get(self._page.title, Order())
        name = None if queue is None else queue.queue
        lines = select(self._page, overview, queue=name, text=self._filter, order=order)
        self._rows.show(self._page, lines, order)

    def _show_pages(self) -> None:
        self._pages.update(pages_text(self._page, self._rows.place, self._rows.order, self._filter))

    def on_row_list_moved(self, message: RowList.Moved) -> None:
        """Show the details of the line of the cursor."""
        if not self.screen_stack:  # the view ends
            return
        if message.rows.id == "queues":
            self._show_rows()
        focused = self.focused if isinstance(self.focused, RowList) else self._rows
        line = focused.selected
        detail = "" if line is None else focused.table.detail(line)
        self._detail.update(visible(" ".join(detail.split())))
        self._show_pages()

    def on_row_list_chosen(self, message: RowList.Chosen) -> None:
        """Show the slots of the worker on which Enter was pressed."""
        line = message.rows.selected
        if isinstance(line, WorkerLine):
            self._filter = line.worker
            self._go_to(SLOTS)

    # ---- keys

    def action_interrupt(self) -> None:
        """End the view as Ctrl-C ends every command."""
        self.exit(return_code=EXIT_INTERRUPTED)

    def action_page(self, number: int) -> None:
        """Show a page by its number, from 1 on."""
        self._go_to(PAGES[number - 1])

    def action_next_page(self, step: int) -> None:
        """Show the page on the right (1) or on the left (-1)."""
        self._go_to(PAGES[(PAGES.index(self._page) + step) % len(PAGES)])

    def _go_to(self, page: Table) -> None:
        self._page = page
        self.refresh_bindings()
        self._show_rows()
        self._wake.set()  # some pages need data that is read only for them

    def action_sort(self) -> None:
        """Sort by the next column."""
        order = self._orders.get(self._page.title, Order())
        self._orders[self._page.title] = order.next_of(self._page)
        self._show_rows()

    def action_reverse(self) -> None:
        """Reverse the order."""
        order = self._orders.get(self._page.title, Order())
        self._orders[self._page.title] = Order(order.column, not order.is_reversed)
        self._show_rows()

    def action_filter(self) -> None:
        """Ask for the text of the filter."""
        self._filter_input.add_class("shown")
        self._filter_input.value = self._filter
        self._filter_input.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._filter = event.value
        self._show_rows()

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self._leave_filter()

    def action_clear_filter(self) -> None:
        """Show all lines again."""
        self._filter = ""
        self._leave_filter()

    def _leave_filter(self) -> None:
        self._filter_input.remove_class("shown")
        self._rows.focus()
        self._show_rows()

    # ---- actions

    def check_action(self, action: str, _: tuple[object, ...]) -> bool | None:
        """Return whether the footer shows an action, which depends on the lines of the page."""
        if action == "cancel":
            return self._page in (SLOTS, WAITING)
        if action == "retry":
            return self._page is DEAD
        return True

    def action_pause(self) -> None:
        """Pause or resume the queue of the cursor in the table of queues."""
        self._carry_out(pause_or_resume(self._selected_queue), "Select a queue first: Tab, then the arrow keys.")

    def action_cancel(self) -> None:
        """Cancel the job of the line, after a question."""
        self._carry_out(cancel_job(self._rows.selected), "There is no job to cancel.")

    def action_retry(self) -> None:
        """Submit the job of a dead letter again, after a question."""
        self._carry_out(retry_letter(self._rows.selected), "There is no job to retry.")

    def _carry_out(self, command: Command | None, missing: str) -> None:
        """Run a command, after its question is answered with yes. Without a command, show `missing`."""
        if command is None:
            self.notify(missing, severity="warning")
        elif command.question is None:
            self.run_worker(self._run(command))
        else:
            self.push_screen(Question(visible(command.question)), lambda is_yes: self._answered(command, is_yes))

    def _answered(self, command: Command, is_yes: bool | None) -> None:
        if is_yes:
            self.run_worker(self._run(command))

    async def _run(self, command: Command) -> None:
        try:
            message = await command.run(self._queues)
        except (LlamaqError, RedisError) as exc:
            self.notify(explain(exc), severity="error", markup=False)
        else:
            self.notify(message, markup=False)
        self._wake.set()
