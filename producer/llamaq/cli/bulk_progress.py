"""Shows the progress of a bulk run: a progress bar in a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn

from llamaq.cli import views
from llamaq.producer.bulk import BulkProgress, BulkState

LINE_S = 10.0
"""Time between two lines, if standard error is not a terminal."""


@contextmanager
def show_progress(name: str) -> Iterator[Callable[[BulkProgress], None]]:
    """Yield a function that shows a progress.

    Args:
        name: What the run writes, as the title of the progress bar.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines().show
        return
    columns = (SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[note]}")
    bar = Progress(*columns, console=console)
    task = bar.add_task(name, total=None, note="")

    def show(progress: BulkProgress) -> None:
        note = ", ".join(details(progress))
        with suppress(OSError):  # a closed terminal must not end the run
            bar.update(task, total=progress.rows_total, completed=progress.rows_done, note=note, refresh=True)

    bar.start()
    try:
        yield show
    finally:
        with suppress(OSError):
            bar.stop()


class _Lines:
    """Prints a line at the start, at the end, at a problem, and otherwise every `LINE_S` seconds."""

    def __init__(self) -> None:
        self._shown_s: float | None = None
        self._has_notice = False

    def show(self, progress: BulkProgress) -> None:
        """Print the progress if a line is due."""
        now_s = time.monotonic()
        is_due = self._shown_s is None or now_s - self._shown_s >= LINE_S
        has_notice = progress.notice is not None
        if is_due or progress.state is not BulkState.RUNNING or (has_notice and not self._has_notice):
            self._shown_s, self._has_notice = now_s, has_notice
            total = "?" if progress.rows_total is None else progress.rows_total
            rows = f"{progress.rows_done}/{total} rows"
            with suppress(OSError):  # a full disk for the progress must not end the run
                views.notice(", ".join([rows, *details(progress)]))


def details(progress: BulkProgress) -> list[str]:
    """Return the parts of the text that follows the number of rows."""
    parts = [f"{progress.tokens_per_s:.0f} tokens/s"]
    if progress.prompt_tokens:
        parts.append(f"{progress.cached_share:.0%} of the prompts cached")
    if progress.rows_failed:
        parts.append(f"{progress.rows_failed} failed")
    if progress.state is BulkState.RUNNING and progress.eta_s is not None:
        parts.append(f"{views.format_age(progress.eta_s)} left")
    if progress.notice:
        parts.append(progress.notice)
    return parts
