"""Line editing and a history of lines for `input()`, with the readline module where Python has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_LINES = 1000
"""Largest number of lines in the history file."""


def history_file() -> Path:
    """Return the path of the history file, in the folder that the XDG base directory specification names."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    state = Path(folder) if folder.startswith("/") else Path.home() / ".local" / "state"
    return state / "llamaq" / "chat_history"


@contextmanager
def line_editing(*, keeps_history: bool) -> Iterator[None]:
    """Let `input()` edit lines in this context. The arrow keys recall earlier lines.

    Args:
        keeps_history: Whether the lines are read from the history file, and written to it at the end. Otherwise, the
            history has only the lines of this process. A file that cannot be read or written is ignored.
    """
    try:
        import readline  # imports only: from now on, `input()` uses it
    except ImportError:  # some builds of Python have no readline
        yield
        return
    readline.set_history_length(MAX_LINES)
    if keeps_history:
        with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
            readline.read_history_file(history_file())
    try:
        yield
    finally:
        if keeps_history:
            with suppress(OSError, RuntimeError):
                path = history_file()
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.touch(mode=0o600)  # messages may be private
                readline.write_history_file(path)
