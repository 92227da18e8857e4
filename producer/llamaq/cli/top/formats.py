"""Formats the numbers of the view in few characters."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

from llamaq.cli.columns import visible
from llamaq.cli.views import NO_VALUE, format_age

ELLIPSIS = "…"


def elide(text: str, width: int) -> str:
    """Return the text in at most `width` cells of the terminal. The middle of a longer text is left out.

    The ends of ids differ more than their beginnings, so two thirds of the remaining characters are from the end.
    """
    text = visible(text)
    if cell_len(text) <= width:
        return text
    n_end = width * 2 // 3
    n_start = width - n_end - 1
    if n_start < 1 or cell_len(text) != len(text):
        return set_cell_size(text, max(0, width - 1)).rstrip() + ELLIPSIS[:width]
    return text[:n_start] + ELLIPSIS + text[-n_end:]


def format_number(value: int | None) -> str:
    """Return a number in at most six characters: `99999`, `123k`, `12M`."""
    if value is None:
        return NO_VALUE
    for divisor, unit in ((1, ""), (1000, "k"), (1_000_000, "M")):
        if abs(value) < 100_000 * divisor:
            return f"{value // divisor}{unit}"
    return f"{value // 10**9}G"


def format_rate(value: float | None) -> str:
    """Return a rate per second in at most five characters: `0.05`, `7.3`, `812`, `12k`."""
    if value is None:
        return NO_VALUE
    if value >= 99_950:
        return f"{value / 1000:.0f}k"
    if value == 0 or value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def format_ms(value: float | None) -> str:
    """Return milliseconds in at most six characters: `0.4`, `12.5`, `830`, `95.2s`."""
    if value is None:
        return NO_VALUE
    if value >= 99_950:
        return format_age(value / 1000)
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_share(value: float | None) -> str:
    """Return a share as a percentage."""
    return NO_VALUE if value is None else f"{value:.0%}"


def format_bytes(value: int) -> str:
    """Return a size in at most five characters: `0`, `64M`, `1.5G`."""
    for unit, size in (("T", 2**40), ("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 9.95 * size else f"{value / size:.0f}{unit}"
    return str(value)


def format_duration(seconds: float | None) -> str:
    """Return a duration in its largest unit."""
    return NO_VALUE if seconds is None else format_age(seconds)
