"""Prints `?` for characters that the encoding of an output does not have, where a person reads this output."""

from __future__ import annotations

from io import TextIOWrapper
from typing import TextIO


def replace_in_terminal(stream: TextIO | None) -> None:
    """Let a terminal show `?` for characters that its encoding does not have.

    In a file or a pipe they are an error, because a program would not notice that characters are missing.
    """
    if stream is not None and not stream.closed and stream.isatty():
        replace_in(stream)


def replace_in(stream: TextIO | None) -> None:
    """Let an output contain `?` for characters that its encoding does not have."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")
