"""The lines of text above the tables of the view. Pure functions."""

from __future__ import annotations

from rich.text import Text

from llamaq.cli.top.formats import format_rate
from llamaq.cli.top.line_types import Overview, QueueLine
from llamaq.cli.top.table import Order, Table
from llamaq.cli.top.table_columns import PAGES

ALMOST_FULL = 0.9
"""Used share of the memory of Redis. From this share on, the first line shows it."""


def status_text(server: str, overview: Overview | None, error: str) -> str:
    """Return the first line: the sums of all queues, or the error of the last reading."""
    if error:
        return error
    if overview is None:
        return f"{server}: reading"
    parts = [server, *_sums(overview.total)] if overview.queues else [f"{server}: no queue has a job or a worker"]
    if overview.redis_fullness >= ALMOST_FULL:
        parts.append(f"Redis is {overview.redis_fullness:.0%} full")
    if overview.n_hidden_queues:
        parts.append(f"{overview.n_hidden_queues} queues are not shown (--queue)")
    if overview.damaged_queues:
        parts.append(f"cannot be read: {', '.join(overview.damaged_queues)}")
    return " · ".join(parts)


def _sums(total: QueueLine) -> list[str]:
    return [
        f"{total.waiting} waiting",
        f"{total.running} running",
        f"{total.workers} workers",
        f"{total.busy_slots}/{total.slots} slots",
        f"{format_rate(total.tokens_per_s)} tok/s",
    ]


def pages_text(page: Table, place: str, order: Order, text: str) -> Text:
    """Return the titles of the pages, and after them the place, the order and the filter of the shown page.

    Args:
        page: The shown page.
        place: Which of its lines are on the screen; empty if all are.
        order: Its order.
        text: The text of the filter; empty if there is none.
    """
    titles = Text()
    for number, one in enumerate(PAGES, 1):
        titles.append(f" {number} {one.title} ", style="reverse" if one is page else "")
    notes = [place]
    if order != Order():
        notes.append(f"by {order.column or 'default'}{' reversed' if order.is_reversed else ''}")
    if text:
        notes.append(f"/{text}")
    return titles.append("".join(f"  {note}" for note in notes if note))


def server_name(url: str) -> str:
    """Return the servers and the database of a Redis URL, without user, password and options."""
    scheme, _, rest = url.partition("://")
    address = rest.partition("?")[0].rpartition("@")[2].rstrip("/")
    return address if scheme in ("redis", "rediss") else f"{scheme}://{address}"
